"""Compare whole RL iterations: CPU seconds until the policy of the Hanoi example solves 80% of its training prompts, ours and TRL's.

Run ``python -m benchmarks.iteration``, or see ``--help``. Both start from the same policy (the example's supervised warm-up, made once) and
take the same rewards, sampling (temperature 1, 16 prompts x 16 rollouts, 72 tokens at most), clipped token-mean loss, 4 optimizer steps per
iteration, AdamW and constant learning rate. Accuracy is the mean reward of an iteration's rollouts, averaged over the last four iterations;
the clock, CPU time of the slowest rank, starts when training starts and is read when an iteration's rewards are known. Random numbers
differ, so the number of iterations does too: look at the seconds per iteration beside it, and at several ``--seeds``.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked ranks of a multi-threaded parent hang
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import lightning.pytorch as pl
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.measuring import machine, note, print_header, print_row
from benchmarks.trainers import _quiet, trl_missing
from examples.hanoi.task import HanoiTokenizer, hanoi_reward, train_prompts
from lightning_rlbatch import PPOModule, RLBatchFSDPStrategy, RolloutDataModule
from lightning_rlbatch.callbacks.rollout_hooks import RolloutCallback, Rollouts
from lightning_rlbatch.functional import PPOClip
from lightning_rlbatch.testing import run_distributed

PROMPTS, ROLLOUTS, STEPS, MAX_TOKENS = 16, 16, 4, 72  # per iteration, per prompt, per iteration, of a response
LEARNING_RATE, CLIP, GRAD_NORM = 3e-4, (0.2, 0.28), 0.5
WINDOW = 4  # iterations of the moving mean


@dataclasses.dataclass(frozen=True)
class Job:
    """What to reach.

    Attributes:
        policy: Folder of the warmed-up policy.
        accuracy: Where to stop.
        limit: CPU seconds of a rank after which to give up.
        seed: Of sampling.
    """

    policy: str
    accuracy: float
    limit: float
    seed: int


class Progress:
    """Follows the accuracy of iterations over CPU time.

    Attributes:
        seconds: CPU time since training started, when each iteration's rewards were known.
        accuracy: Mean reward of each iteration's rollouts.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seconds: list[float] = []
        self.accuracy: list[float] = []
        self.start()

    def start(self) -> None:
        self._start, self._wall = time.process_time(), time.perf_counter()

    def add(self, accuracy: float) -> bool:
        """Note an iteration; return whether to stop, which only the accuracy decides on several ranks."""
        self.seconds.append(time.process_time() - self._start)
        self.accuracy.append(accuracy)
        return self.reached or self.seconds[-1] > self.job.limit

    @property
    def moving(self) -> float:
        """Mean of the last iterations."""
        return statistics.fmean(self.accuracy[-WINDOW:])

    @property
    def reached(self) -> bool:
        return len(self.accuracy) >= WINDOW and self.moving >= self.job.accuracy


def warm_up(folder: Path) -> Path:
    """Run the example's supervised warm-up, unless it has been run; return the policy's folder."""
    policy = folder / "outputs" / "hanoi" / "sft" / "policy"
    if not policy.exists():
        root = Path(__file__).parents[1]
        folder.mkdir(parents=True, exist_ok=True)
        config = root / "examples" / "hanoi" / "sft.yaml"
        paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "lightning_rlbatch", "fit", "--config", str(config), "--trainer.enable_progress_bar=false"]
        finished = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, check=False, capture_output=True, text=True)
        if finished.returncode:
            sys.exit(f"The warm-up failed.\n{finished.stderr}")
    return policy.resolve()


class Stop(RolloutCallback):
    """Notes every iteration of ours, and stops on all ranks alike."""

    def __init__(self, job: Job) -> None:
        self.progress = Progress(job)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.progress.start()

    def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollouts: Rollouts) -> None:
        over = self.progress.add(float(rollouts.store.table.rewards.mean()))
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(over, all=False)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


def run_ours(rank: int, ranks: int, job: Job) -> Progress:
    """Train with this package."""
    _quiet()
    pl.seed_everything(job.seed, verbose=False)
    stop = Stop(job)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="auto" if ranks == 1 else RLBatchFSDPStrategy(),
        max_epochs=1000,
        callbacks=[stop],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = PPOModule(
        job.policy,
        [hanoi_reward],
        policy_loss=PPOClip(clip_low=CLIP[0], clip_high=CLIP[1]),
        optimizer=adamw,
        max_grad_norm=GRAD_NORM,
    )
    data = RolloutDataModule(
        train_prompts=train_prompts,
        tokenizer=HanoiTokenizer(),
        train_batch_size=PROMPTS,
        rollouts_per_prompt=ROLLOUTS,
        mini_batch_size=PROMPTS // STEPS,
        max_tokens_per_rank=2048,
        max_prompt_length=8,
        max_response_length=MAX_TOKENS,
        seed=job.seed,
    )
    trainer.fit(module, datamodule=data)
    return stop.progress


def _tokenizer() -> Any:
    """Return the example's tokenizer in the form that TRL needs: prompts are a token per character, moves are joined by spaces."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ours = HanoiTokenizer()
    names = [ours.decode([index], skip_special_tokens=False) for index in range(len(ours))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def run_trl(rank: int, ranks: int, job: Job) -> Progress:
    """Train with TRL's GRPOTrainer, its own generation included."""
    _quiet()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        os.environ.pop(name, None)
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    progress, over = Progress(job), False

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        nonlocal over
        rewards = hanoi_reward(prompts, completions)
        over = progress.add(statistics.fmean(rewards))
        return rewards

    class Watch(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            progress.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = over

    config = GRPOConfig(
        output_dir="/tmp/trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=PROMPTS * ROLLOUTS // STEPS,
        gradient_accumulation_steps=1,
        steps_per_generation=STEPS,
        num_generations=ROLLOUTS,
        max_completion_length=MAX_TOKENS,
        max_steps=100_000,
        gradient_checkpointing=False,
        beta=0.0,
        epsilon=CLIP[0],
        epsilon_high=CLIP[1],
        loss_type="bnpo",  # the mean over the tokens of an optimizer step, as ours
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=GRAD_NORM,
        seed=job.seed,
        logging_strategy="no",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.policy),
        reward_funcs=[reward],
        args=config,
        train_dataset=Dataset.from_list(train_prompts()),
        processing_class=_tokenizer(),
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return progress


METHODS: dict[str, tuple[Callable[[int, int, Job], Progress], int]] = {
    "ours": (run_ours, 1),
    "ours, 2 ranks": (run_ours, 2),
    "TRL": (run_trl, 1),
}


def measure(method: str, job: Job) -> Progress:
    """Run a method on forked ranks; return the slowest rank's times."""
    function, ranks = METHODS[method]
    found: list[Progress] = run_distributed(function, ranks, job, timeout=3600.0, init_process_group=False)
    return max(found, key=lambda progress: progress.seconds[-1])


def main(arguments: list[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--accuracy", type=float, default=0.8)
    parser.add_argument("--limit", type=float, default=200.0, help="CPU seconds of a rank after which a method gives up")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks"), help="where the warmed-up policy is kept")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    disable_progress_bar()
    missing = trl_missing()
    if missing and "TRL" in options.method:
        note(missing)
        options.method.remove("TRL")
    policy = warm_up(options.folder)
    print(f"{machine()}\n1 thread per rank; {PROMPTS} prompts x {ROLLOUTS} rollouts and {STEPS} optimizer steps per iteration\n")
    print_header(
        [
            "trainer",
            "seed",
            "accuracy at first",
            "reached",
            "iterations",
            f"CPU s to {options.accuracy:.2f}",
            "CPU s / iteration",
            "to ours",
        ]
    )
    first: dict[int, float] = {}
    for seed in range(options.seeds):
        for method in options.method:
            progress = measure(method, Job(str(policy), options.accuracy, options.limit, seed))
            each = progress.seconds[-1] / len(progress.seconds)
            ratio = each / first.setdefault(seed, each)
            total = f"{progress.seconds[-1]:.0f}" if progress.reached else f"not in {progress.seconds[-1]:.0f}"
            cells = [f"{progress.accuracy[0]:.2f}", f"{progress.moving:.2f}", len(progress.seconds), total, f"{each:.2f}", f"{ratio:.2f}x"]
            print_row([method, seed, *cells])


if __name__ == "__main__":
    main()
