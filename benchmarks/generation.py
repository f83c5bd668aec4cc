"""Compare the embedded rollout engine with plain left-padded ``generate`` on the response lengths of the Tower of Hanoi.

Run ``python -m benchmarks.generation``, or see ``--help``. The policy is a Llama whose next token is laid down by a table (the
transformer computes as always, its output has no say), so that both methods produce the same responses, of the lengths of optimal
solutions: 2**n - 1 moves and an end token for n = 2 to 6 disks, equally often. ``generate`` gets all rollouts as one batch, with
every trick that its arguments offer; the engine's other methods (``generate`` with a seed per rollout, continuous batching) are
measured too. Time is CPU time of one thread on a CPU, elapsed time on a GPU; methods take turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_rlbatch.rollout import RolloutRequest, SamplingParams, TransformersEngine, rollout_seed
from lightning_rlbatch.rollout.transformers_engine import DecodingMethod

LENGTHS = tuple(2**disks for disks in range(2, 7))  # moves and the end token
PAD, EOS, FIRST = 0, 1, 2
NUM_PROMPT_TOKENS = 6


def scripted(config: LlamaConfig) -> LlamaForCausalLM:
    """Return a Llama that answers a prompt of class c with ``LENGTHS[c]`` tokens."""
    model = LlamaForCausalLM(config).eval()
    following = _following_tokens()

    def decide(module: Any, arguments: Any, options: dict[str, Any], output: Any) -> Any:
        kept = options.get("logits_to_keep")  # positions, where sequences are packed
        last = options["input_ids"][:, kept if isinstance(kept, torch.Tensor) else slice(-output.logits.shape[1], None)]
        output.logits = (output.logits * 0.01).scatter(-1, following.to(last.device)[last].unsqueeze(-1), 1e4)
        return output

    model.register_forward_hook(decide, with_kwargs=True)
    return model


def prompt_of(length_class: int) -> list[int]:
    """Return the prompt whose answer has ``LENGTHS[length_class]`` tokens."""
    return [FIRST + len(LENGTHS)] * (NUM_PROMPT_TOKENS - 1) + [FIRST + length_class]


def vocabulary_size() -> int:
    """Return the number of tokens: padding, end, a token per class, a filler, and one per place of each answer."""
    return FIRST + len(LENGTHS) + 1 + sum(LENGTHS)


def _following_tokens() -> torch.Tensor:
    following = torch.full((vocabulary_size(),), EOS)
    place = FIRST + len(LENGTHS) + 1
    for length_class, length in enumerate(LENGTHS):
        chain = [FIRST + length_class, *range(place, place + length - 1)]
        following[chain[:-1]] = torch.tensor(chain[1:], dtype=torch.int64)
        place += length
    return following


def plain_generate(model: LlamaForCausalLM, prompts: list[list[int]], max_new_tokens: int, with_log_probs: bool) -> list[int]:
    """Return the lengths of the answers that ``generate`` samples, with the log-probs that a trainer needs or without."""
    ids = torch.tensor(prompts, device=model.device)  # equally long, so that left-padding costs nothing here
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=True,
        top_k=0,
        eos_token_id=EOS,
        pad_token_id=PAD,
        output_logits=with_log_probs,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[:, ids.shape[1] :]
    if with_log_probs:
        columns = zip(output.logits, tokens.unbind(1), strict=True)
        log_probs = torch.cat([logits.float().log_softmax(-1).gather(1, column[:, None]) for logits, column in columns], dim=1)
        assert log_probs[:, 0].isfinite().all()
    return (tokens != PAD).sum(1).tolist()


def by_engine(engine: TransformersEngine, prompts: list[list[int]], max_new_tokens: int) -> list[int]:
    """Return the lengths of the answers that an engine samples."""
    requests = [RolloutRequest(ids, rollout_seed(0, 0, index, 0)) for index, ids in enumerate(prompts)]
    completions = engine.generate(requests, SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(EOS,)))
    return [len(completion.token_ids) for completion in completions]


def timed(run: Callable[[], list[int]], expected: list[int], device: str) -> float:
    """Return the seconds that a run takes, after checking what it sampled."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    lengths = run()
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = clock() - start
    assert lengths == expected, "a method sampled other answers than the table lays down"
    return seconds


def main() -> None:
    """Print a line per method and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--rollouts", type=int, default=16, help="per prompt")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--max-response-length", type=int, default=72)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary_size(),
        hidden_size=options.hidden_size,
        intermediate_size=5 * options.hidden_size // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=max(2, options.hidden_size // 64),
        max_position_embeddings=128,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = scripted(config).to(options.device)
    engines = {name: TransformersEngine(model, pad_token_id=PAD, method=name) for name in get_args(DecodingMethod)}
    classes = [index % len(LENGTHS) for index in range(options.prompts) for _ in range(options.rollouts)]
    prompts, expected = [prompt_of(length_class) for length_class in classes], [LENGTHS[length_class] for length_class in classes]
    methods: dict[str, Callable[[], list[int]]] = {
        "generate": lambda: plain_generate(model, prompts, options.max_response_length, with_log_probs=False),
        "generate + log-probs": lambda: plain_generate(model, prompts, options.max_response_length, with_log_probs=True),
    }
    for name, engine in engines.items():
        label = "seeded generate" if name == "generate" else name
        methods[label] = partial(by_engine, engine, prompts, options.max_response_length)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(options.repeats + 1):
        for name, run in methods.items():
            seconds[name].append(timed(run, expected, options.device))
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first of each warms up
    print(f"{len(prompts)} rollouts, {sum(expected)} tokens, hidden size {options.hidden_size}, {options.layers} layers, {options.device}")
    for name, median in medians.items():
        ratio = median / medians["embedded"]
        print(f"{name:21}{median:7.2f} s{sum(expected) / median:9.0f} tokens/s   embedded is {ratio:.2f}x as fast")


if __name__ == "__main__":
    main()
