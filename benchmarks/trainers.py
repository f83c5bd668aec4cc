"""The trainers that the update benchmark compares: ours, padded rows in plain Lightning, and TRL's GRPO.

All get the same samples, weights, clipped loss (mean over all response tokens of the optimizer step) and optimizer. Each returns
one :class:`Step` per optimizer step; the first step is a tiny one that allocates what every step needs.
"""

import dataclasses
import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from benchmarks.measuring import forget_peak, peak_mb, resident_mb
from benchmarks.workloads import Workload, cached_batch, make_batch, make_model
from lightning_rlbatch import PPOModule, RLBatchFSDPStrategy
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.planning import plan_mini_batch
from lightning_rlbatch.models.scoring import HEAD_MEMORY_MIB
from lightning_rlbatch.modules.gradient_norm import total_norm

CLIP = 0.2
LEARNING_RATE = 1e-6


@dataclasses.dataclass
class Step:
    """One optimizer step on one rank.

    Attributes:
        seconds: CPU time since the step before ended: collating, forward, backward, step, and everything between them.
        extra_mb: Peak of memory over what the process had before the first real step.
        loss: Clipped policy loss.
        grad_norm: Before clipping.
    """

    seconds: float
    extra_mb: float
    loss: float
    grad_norm: float


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train.

    Attributes:
        workload: Samples of an optimizer step, over all ranks.
        micro_batch_size: Samples of a padded micro-batch.
        max_tokens_per_rank: Token budget of a packed micro-batch.
        repeats: Real optimizer steps.
        head_memory_mib: Option of ours of that name.
    """

    workload: Workload
    micro_batch_size: int
    max_tokens_per_rank: int
    repeats: int
    head_memory_mib: float = HEAD_MEMORY_MIB

    def batches(self) -> Iterator[PackedBatch]:
        """Yield the samples of each optimizer step."""
        yield make_batch(self.workload.tiny())
        for _ in range(self.repeats):
            yield cached_batch(self.workload)


class Clock:
    """Takes the time and the memory at the end of each step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._last = time.process_time()
        self._before = resident_mb()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the block takes."""
        start = time.process_time()
        yield
        self._last += time.process_time() - start

    def tick(self, loss: float, grad_norm: float) -> None:
        """Note the end of a step."""
        now = time.process_time()
        self.steps.append(Step(now - self._last, peak_mb() - self._before, loss, grad_norm))
        if len(self.steps) == 1:
            forget_peak()
            self._before = resident_mb()
        self._last = time.process_time()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


class ClockCallback(Callback):
    """Ticks at the end of every Lightning batch."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clock = Clock()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        metrics = trainer.callback_metrics
        self.clock.tick(float(metrics["train/loss"]), float(metrics["train/grad_norm/policy"]))


class Loader:
    """A sized loader that makes each batch when asked for it."""

    def __init__(self, job: Job, make: Any) -> None:
        self.job, self.make = job, make

    def __len__(self) -> int:
        return 1 + self.job.repeats

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.job.batches())


def _fit(module: pl.LightningModule, loader: Loader, strategy: Any, ranks: int) -> list[Step]:
    _quiet()
    clock = ClockCallback()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, loader)
    return clock.clock.steps


def _quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def no_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Satisfy a signature: nothing is rolled out."""
    return [0.0] * len(completions)


def run_ours(rank: int, ranks: int, job: Job) -> list[Step]:
    """Train with this package: planned, packed micro-batches, tiled head."""

    def cut(batch: PackedBatch) -> MiniBatch:
        plan = plan_mini_batch(batch.lengths, dp_size=ranks, max_tokens_per_rank=job.max_tokens_per_rank)
        return MiniBatch.cut(batch, plan.assignment[rank], plan=plan)

    module = PPOModule(lambda: make_model(job.workload.vocabulary), [no_reward], optimizer=adamw, head_memory_mib=job.head_memory_mib)
    return _fit(module, Loader(job, cut), "auto" if ranks == 1 else RLBatchFSDPStrategy(), ranks)


def clipped_loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """Return PPO's clipped loss: the sum over a micro-batch over the tokens of the optimizer step."""
    ratio = torch.exp(log_probs - old)
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return (terms * mask).sum() / num_tokens


class PaddedModule(pl.LightningModule):
    """What one writes by hand: micro-batches of fixed size, padded to their longest sample, log-softmax of all logits.

    Gradients are accumulated with the right divisor, which many such loops get wrong.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = make_model(vocabulary)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())

    def training_step(self, batch: tuple[list[dict[str, Tensor]], int], batch_idx: int) -> None:
        micro_batches, num_tokens = batch
        optimizer, total = self.optimizers(), 0.0
        for index, micro in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            strategy: Any = self.trainer.strategy
            if isinstance(strategy, DDPStrategy):
                strategy.model.require_backward_grad_sync = last
            logits = self._forward(micro)
            mask = micro["response_mask"][:, 1:]
            log_probs = torch.log_softmax(logits[:, :-1], dim=-1).gather(2, micro["input_ids"][:, 1:, None]).squeeze(2)
            loss = clipped_loss(log_probs, micro["old_log_probs"][:, 1:], micro["advantages"][:, 1:], mask, num_tokens)
            self.manual_backward(loss * self.trainer.world_size)
            total += float(loss.detach())
        norm = total_norm([parameter.grad for parameter in self.parameters()])
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.log_dict({"train/loss": total, "train/grad_norm/policy": float(norm)}, batch_size=1)

    def _forward(self, micro: dict[str, Tensor]) -> Tensor:
        wrapped: Any = self.trainer.strategy.model  # DDP prepares its reduction in its own forward
        arguments = {"input_ids": micro["input_ids"], "attention_mask": micro["attention_mask"], "use_cache": False}
        return wrapped(**arguments).logits

    def forward(self, **arguments: Any) -> Any:
        return self.model(**arguments)


def run_padded(rank: int, ranks: int, job: Job) -> list[Step]:
    """Train padded rows with full logits in a plain Lightning loop."""

    def cut(batch: PackedBatch) -> tuple[list[dict[str, Tensor]], int]:
        own = range(batch.num_samples)[rank * batch.num_samples // ranks : (rank + 1) * batch.num_samples // ranks]
        size = job.micro_batch_size
        rows = [batch.select(own[start : start + size]).to_padded(pad_id=0) for start in range(0, len(own), size)]
        return rows, int(batch["response_mask"].sum())

    class Direct(DDPStrategy):
        """DDP around the module's forward, called from training_step."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return self.lightning_module.training_step(*args, **kwargs)

    module = PaddedModule(job.workload.vocabulary)
    return _fit(module, Loader(job, cut), "auto" if ranks == 1 else Direct(), ranks)


def trl_missing() -> str | None:
    """Say why TRL cannot be run, or None."""
    try:
        import trl  # noqa: F401  # only asks whether it is there
    except ImportError as error:
        return f"TRL is left out: {error}. Install it beside this package, in an environment of its own: pip install trl"
    return None


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "x": 3}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _trl_rows(batch: PackedBatch, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return what TRL makes of a rank's generations: prompts padded on the left, completions on the right, to the longest of all."""
    own = batch.select(range(rank * batch.num_samples // ranks, (rank + 1) * batch.num_samples // ranks))
    masks = own.split_per_sample("response_mask")
    starts = [int(mask.sum()) for mask in masks]
    rows = own.num_samples
    prompts = max(len(mask) - count for mask, count in zip(masks, starts))
    width = max(starts)
    out = {name: torch.zeros(rows, prompts, dtype=torch.int64) for name in ("prompt_ids", "prompt_mask")}
    out |= {name: torch.zeros(rows, width, dtype=torch.int64) for name in ("completion_ids", "completion_mask")}
    out["old_per_token_logps"] = torch.zeros(rows, width)
    for row, (ids, old, count) in enumerate(zip(own.split_per_sample("input_ids"), own.split_per_sample("old_log_probs"), starts)):
        cut = len(ids) - count
        out["prompt_ids"][row, prompts - cut :], out["prompt_mask"][row, prompts - cut :] = ids[:cut], 1
        out["completion_ids"][row, :count], out["completion_mask"][row, :count] = ids[cut:], 1
        out["old_per_token_logps"][row, :count] = old[cut:]
    out["advantages"] = own["advantage"]
    out["num_items_in_batch"] = batch["response_mask"].sum()
    return out


def run_trl(rank: int, ranks: int, job: Job) -> list[Step]:
    """Train with TRL's GRPOTrainer; only its generation is replaced, by the given samples."""
    _quiet()
    if ranks == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
            os.environ.pop(name, None)
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = Clock()
    batches = job.batches()

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
            return _trl_rows(next(batches), rank, ranks)

    class Ticks(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal clock
            clock = Clock()

        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            # Its own number is torch's single fp32 sum: see total_norm. Gradients are clipped by now, by that number.
            with clock.paused():
                self.clipped = float(total_norm([parameter.grad for parameter in model.parameters()]))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "grad_norm" in logs:
                clock.tick(float(logs["loss"]), self.clipped * max(1.0, float(logs["grad_norm"]) + 1e-6))

    per_rank = len(job.workload.lengths) // ranks
    accumulation = per_rank // job.micro_batch_size
    config = GRPOConfig(
        output_dir="/tmp/trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=job.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_generations=job.micro_batch_size,
        max_completion_length=max(job.workload.responses),
        max_steps=1 + job.repeats,
        gradient_checkpointing=False,
        beta=0.0,
        epsilon=CLIP,
        loss_type="dapo",  # the default: the mean over all tokens of the optimizer step
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Given(
        model=make_model(job.workload.vocabulary),
        reward_funcs=[no_reward],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * (4 * len(job.workload.lengths))),
        processing_class=_tokenizer(),
        callbacks=[Ticks()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock.steps


TRAINERS = {"ours": run_ours, "padded": run_padded, "trl": run_trl}
