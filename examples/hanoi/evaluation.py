"""Measure a saved policy: how often a sampled answer solves its puzzle."""

from pathlib import Path

from transformers import AutoModelForCausalLM

from examples.hanoi.task import HanoiTokenizer, hanoi_reward, held_out_prompts, train_prompts
from lightning_rlbatch.rollout import RolloutRequest, SamplingParams, TransformersEngine, rollout_seed

EVALUATION = 1_000_003  # seed apart from those of training


def accuracy_by_disks(folder: Path, num_samples: int) -> dict[tuple[str, int | None], float]:
    """Return the share of solved samples per split and number of disks; the number None is the mean over all puzzles of the split.

    Args:
        folder: What ``save_pretrained`` wrote.
        num_samples: Answers sampled per puzzle, at temperature 1.
    """
    tokenizer = HanoiTokenizer()
    engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(folder), pad_token_id=tokenizer.pad_token_id)
    sampling = SamplingParams(max_new_tokens=72, stop_token_ids=(tokenizer.eos_token_id,))
    accuracy: dict[tuple[str, int | None], float] = {}
    for split, rows in (("held-out", held_out_prompts()), ("training", train_prompts())):
        solved: dict[int, list[float]] = {}
        for index, row in enumerate(rows):
            prompt = str(row["prompt"])
            seeds = [rollout_seed(EVALUATION, len(rows), index, sample) for sample in range(num_samples)]
            requests = [RolloutRequest(tokenizer.encode(prompt), seed) for seed in seeds]
            answers = [tokenizer.decode(completion.token_ids) for completion in engine.generate(requests, sampling)]
            solved.setdefault(int(row["num_disks"]), []).extend(hanoi_reward([prompt] * num_samples, answers))
        for disks, rewards in sorted(solved.items()):
            accuracy[split, disks] = sum(rewards) / len(rewards)
        accuracy[split, None] = sum(map(sum, solved.values())) / sum(map(len, solved.values()))
    return accuracy
