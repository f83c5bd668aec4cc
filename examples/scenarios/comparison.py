"""Run the five scenarios on the same rollouts and compare what they computed: the gradients agree, the work does not.

Run ``python -m examples.scenarios`` in an environment with the ``examples`` extra; it takes well under a minute on two CPU cores.
"""

import dataclasses
import logging
import math
import os
import sys
import tempfile
import time
import warnings
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked ranks of a multi-threaded parent hang

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich import box, get_console
from rich.table import Table
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_rlbatch.cli import RLBatchCLI
from lightning_rlbatch.data import MiniBatch
from lightning_rlbatch.functional import BatchPlan
from lightning_rlbatch.testing import run_distributed

FOLDER = Path(__file__).parent
SCENARIOS = ("plain", "padding_removal", "dynamic", "recommended", "sequence_parallel")


@dataclasses.dataclass
class Outcome:
    """What some optimizer steps of a scenario did.

    Attributes:
        gradients: Whole gradients of each step before clipping, by parameter.
        losses: Loss of each step.
        plans: How each mini-batch was cut.
        seconds: CPU seconds of this rank in the steps; communication that waits is not in it.
        saved_bytes: Most bytes that this rank kept for a backward: activations, and the weights they were made with.
    """

    gradients: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    plans: list[BatchPlan] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    saved_bytes: int = 0

    @property
    def real_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(int(plan.lengths.sum()) for plan in self.plans)

    @property
    def computed_tokens(self) -> int:
        """Tokens that were computed, padding included."""
        return sum(
            plan.padded_num_tokens(rank, step)
            for plan in self.plans
            for rank in range(plan.dp_size)
            for step in range(plan.num_micro_steps)
        )

    @property
    def largest(self) -> int:
        """Most tokens, padding included, that one rank held in a micro-batch: what decides the peak of memory."""
        grid = [
            plan.padded_num_tokens(rank, step) // plan.sp_size
            for plan in self.plans
            for rank in range(plan.dp_size)
            for step in range(plan.num_micro_steps)
        ]
        return max(grid)

    @property
    def micro_steps(self) -> int:
        """Micro-steps of all optimizer steps."""
        return sum(plan.num_micro_steps for plan in self.plans)

    @property
    def efficiency(self) -> float:
        """Mean share of the steps in which the average rank is busy, by the planner's estimate."""
        return sum(plan.efficiency() for plan in self.plans) / len(self.plans)


class SavedForBackward:
    """Measures what autograd keeps between forward and backward, on any device: each storage counts once, while something holds it."""

    def __init__(self) -> None:
        self.peak = 0  # bytes
        self._holders: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held[0])

    def _pack(self, tensor: Tensor) -> tuple[Tensor, object]:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        self._holders[place] += 1
        self._bytes[place] = storage.nbytes()
        self.peak = max(self.peak, sum(self._bytes.values()))
        held = _Held()
        weakref.finalize(held, self._release, place)
        return tensor, held

    def _release(self, place: int) -> None:
        self._holders[place] -= 1
        if self._holders[place] == 0:
            del self._bytes[place]


class _Held:
    """Lives as long as autograd needs what was packed with it."""


class Watch(Callback):
    """Fills an :class:`Outcome`; every rank takes part, since gradients are sharded."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._began = 0.0
        self._saved = SavedForBackward()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: MiniBatch, batch_idx: int) -> None:
        assert batch.plan is not None
        self.outcome.plans.append(batch.plan)
        self._saved = SavedForBackward()
        self._saved.hooks.__enter__()
        self._began = time.process_time()

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        self.outcome.seconds += time.process_time() - self._began
        self._saved.hooks.__exit__(None, None, None)
        self.outcome.saved_bytes = max(self.outcome.saved_bytes, self._saved.peak)
        gradients = {name: parameter.grad for name, parameter in pl_module.named_parameters() if parameter.grad is not None}
        whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
        self.outcome.gradients.append({name: grad.detach().clone() for name, grad in whole.items()})

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.outcome.losses.append(float(trainer.callback_metrics["train/loss"]))


def run_scenarios(rank: int, world_size: int, folder: str, num_steps: int = 2, names: tuple[str, ...] = SCENARIOS) -> dict[str, Outcome]:
    """Train each scenario for some optimizer steps in this process, which is one of ``world_size`` ranks.

    Args:
        rank: Of this process.
        world_size: Number of ranks; the files say 2.
        folder: Where logs go.
        num_steps: Optimizer steps.
        names: Which scenarios.

    Returns:
        Outcome by scenario; gradients and plans are the same on every rank.
    """
    for category in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", category)  # of Lightning's own calls
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    outcomes = {}
    for name in names:
        watch = Watch()
        overrides = [
            f"--trainer.devices={world_size}",
            f"--trainer.max_steps={num_steps}",
            "--trainer.limit_val_batches=0",
            "--trainer.enable_progress_bar=false",
            f"--trainer.logger.init_args.save_dir={folder}",
        ]
        sys.argv = ["rlbatch", "fit", "--config", str(FOLDER / f"{name}.yaml"), *overrides]  # of this forked process only
        RLBatchCLI(trainer_defaults={"callbacks": [watch]})
        outcomes[name] = watch.outcome
    return outcomes


def relative_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference of two gradients over the norm of the second one, over all parameters."""
    assert actual.keys() == expected.keys()
    difference = sum(float((actual[name] - expected[name]).double().square().sum()) for name in expected)
    return math.sqrt(difference / sum(float(expected[name].double().square().sum()) for name in expected))


def main() -> None:
    """Run all scenarios on two ranks and print one row for each."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes: dict[str, Outcome] = run_distributed(run_scenarios, 2, folder, init_process_group=False)[0]
    reference = outcomes["plain"]
    title = f"{len(reference.plans)} optimizer steps on the same {reference.real_tokens:,} tokens, 2 ranks"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("scenario", no_wrap=True)
    for column in ("tokens", "largest", "steps", "busy", "CPU s", "saved", "grad"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, outcome in outcomes.items():
        differences = [relative_difference(*pair) for pair in zip(outcome.gradients, reference.gradients)]
        table.add_row(
            name,
            f"{outcome.computed_tokens:,}",
            f"{outcome.largest}",
            f"{outcome.micro_steps}",
            f"{100 * outcome.efficiency:.0f}%",
            f"{outcome.seconds:.2f}",
            f"{outcome.saved_bytes / 1e6:.1f} MB",
            f"{max(differences):.0e}" if name != "plain" else "-",
        )
    get_console().print(table)
    get_console().print(
        "tokens: computed, padding included. largest: tokens of a rank's largest micro-batch. steps: micro-steps. busy: share of time in"
        " which the average rank works, by the planner's estimate. CPU s: of one rank. saved: most that a rank kept for a backward."
        " grad: distance to plain's gradient over its norm.",
        style="dim",
    )
