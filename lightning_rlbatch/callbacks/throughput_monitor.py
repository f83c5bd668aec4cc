"""Measure tokens per second, use of the device's FLOPs, and where the time of an iteration goes."""

import math
import resource
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import Throughput, get_available_flops
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rlbatch.callbacks.waiting import WaitingClock, WaitingFile
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.strategies.access import meshes_of

WAITING = ("time/waiting", "time/waiting_most", "time/waiting_least")


class ThroughputMonitor(Callback):
    """Log speed at every optimizer step, from the plan's token counts and the clock of rank zero.

    Every step ends with a collective over all ranks, so one clock is enough and nothing is synchronised for the measurement.

    * ``throughput/tokens_per_second``: real tokens trained, over all ranks, per second of wall time, rollouts included and validation
      excluded; running mean over ``window_size`` steps. ``throughput/model_flops_utilization``: the same for FLOPs, against the peak of
      the devices (absent where the peak is unknown, as on a CPU).
    * ``throughput/update/...``: the same numbers within the update alone; ``computed_tokens_per_second`` counts the padding that was
      computed too, and ``padding_share`` is its share.
    * ``time/update``: seconds of the update; ``time/between_updates``: seconds from the last update to this one (rollouts, scoring,
      exchange); ``time/waiting_estimate``: seconds of the update that the average rank waits for the slowest, by the plan's workloads.
    * ``time/waiting``: the same, measured: seconds of this update that the average rank waited for others; ``time/waiting_most`` and
      ``time/waiting_least`` of the ranks that waited most and least. With a CSVLogger ``waiting.csv`` beside its metrics has every rank
      and micro-step. Measured on every ``waiting_every_n_steps``-th step only (a multiple of the Trainer's ``log_every_n_steps``), by a
      timed barrier in front of each gathering of parameters, which makes that step a little slower; under DDP in front of the last
      micro-batch's backward. Not with ``compile_backend``.
      The module logs the phases of a collection as ``time/generation``, ``time/scoring`` and so on; ``time/other_between_updates`` is
      what none of them explains.
    * ``memory/peak_gib``: most memory of rank zero so far: allocated on its GPU, or resident in its process on a CPU.

    Model FLOPs are ``6 P T + 6 A n sum(L^2)`` for a step (forward and backward, no recomputation): P parameters of the trained models
    without input embeddings, T tokens, A query heads x head dimension, n layers, L lengths, causal attention. Generation and scoring are
    not counted, nor are experts told from one another.

    Args:
        window_size: Steps of the running means.
        available_flops: Peak FLOPs per second of one device; None looks the device up.
        waiting_every_n_steps: Measure waiting on every n-th optimizer step, never on the first; None measures none.

    Raises:
        ValueError: ``window_size`` is below 2, or ``waiting_every_n_steps`` below 1.

    Source:
        Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B, with causal attention counted once.
    """

    def __init__(self, *, window_size: int = 20, available_flops: float | None = None, waiting_every_n_steps: int | None = 25) -> None:
        if window_size < 2:
            raise ValueError(f"Expected window_size to be at least 2 but got {window_size}: a speed needs two points in time.")
        if waiting_every_n_steps is not None and waiting_every_n_steps < 1:
            raise ValueError(f"Expected waiting_every_n_steps to be at least 1 but got {waiting_every_n_steps}. Pass None to measure none.")
        self.window_size = window_size
        self.available_flops = available_flops
        self.waiting_every_n_steps = waiting_every_n_steps
        self._clock: WaitingClock | None = None
        self._waiting_file: WaitingFile | None = None
        self._has_measured = False
        self._first_step = 0
        self._now = 0.0
        self._last_end = 0.0
        self._elapsed = 0.0
        self._items = [0, 0]  # steps, tokens

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        peak = self.available_flops
        if peak is None:
            found = get_available_flops(trainer.strategy.root_device, _plugin_to_compute_dtype(trainer.precision_plugin))
            peak = None if found is None else float(found)
        self._peak = peak
        self._models = [flops_coefficients(model) for model in trained_models(pl_module)]
        self._rolling = Throughput(available_flops=peak, world_size=trainer.world_size, window_size=self.window_size)
        logger = next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)
        if logger is not None and trainer.is_global_zero:
            self._waiting_file = WaitingFile(logger.log_dir, keep=trainer.global_step > 0)
        self._items, self._elapsed, self._last_end = [0, 0], 0.0, time.perf_counter()
        self._first_step = trainer.global_step

    @override
    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._now = time.perf_counter()

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._last_end += time.perf_counter() - self._now  # as if validation took no time

    @override
    def on_train_batch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int) -> None:
        self._now = time.perf_counter()
        if self._measures_waiting(trainer):
            self._clock = WaitingClock(pl_module, meshes_of(trainer), pl_module.device)

    def _measures_waiting(self, trainer: "pl.Trainer") -> bool:
        """Whether the step that begins is measured; decided from what all ranks know. The first one of a run warms up."""
        compiled = getattr(trainer.strategy, "compile_backend", None) is not None
        if self.waiting_every_n_steps is None or trainer.world_size == 1 or compiled or trainer.global_step == self._first_step:
            return False
        every = max(1, int(getattr(trainer, "log_every_n_steps", 1)))  # other steps are not logged
        return (trainer.global_step + 1) % (-(-self.waiting_every_n_steps // every) * every) == 0

    @override
    def on_before_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: torch.Tensor) -> None:
        synchronises = getattr(trainer.strategy.model, "require_backward_grad_sync", True)  # of DDP
        if self._clock is not None and not self._clock.watches_blocks and synchronises:
            self._clock.meet()

    @override
    def on_after_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self._clock is not None:
            self._clock.next_micro_step()

    def _waiting(self, trainer: "pl.Trainer") -> dict[str, float]:
        if self._clock is None:  # Lightning would log the value of an earlier step again
            return dict.fromkeys(WAITING, math.nan) if self._has_measured else {}
        self._has_measured = True
        seconds, self._clock = self._clock.stop(), None
        if self._waiting_file is not None:
            self._waiting_file.write(trainer.global_step - 1, seconds.tolist())
        ranks = seconds.sum(dim=1)
        return dict(zip(WAITING, (float(ranks.mean()), float(ranks.max()), float(ranks.min()))))

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        if self._clock is not None:
            self._clock.detach()
            self._clock = None

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int) -> None:
        end = time.perf_counter()
        update, between = end - self._now, self._now - self._last_end
        self._last_end = end
        plan = batch.plan if isinstance(batch, MiniBatch) else None
        metrics = {"time/update": update, "time/between_updates": between, "memory/peak_gib": peak_memory(pl_module.device) / 2**30}
        phases = _phases(trainer) if batch_idx == 0 else {}
        if phases:
            metrics["time/other_between_updates"] = max(0.0, between - sum(phases.values()))
        if plan is not None:
            metrics |= self._speeds(trainer, plan, update, between)
        metrics |= self._waiting(trainer)
        pl_module.log_dict(metrics, batch_size=1)

    def _speeds(self, trainer: "pl.Trainer", plan: BatchPlan, update: float, between: float) -> dict[str, float]:
        tokens = int(plan.lengths.sum())
        computed = sum(plan.padded_num_tokens(rank, step) for rank in range(plan.dp_size) for step in range(plan.num_micro_steps))
        flops = sum(step_flops(plan, *coefficients) for coefficients in self._models)
        metrics = {
            "throughput/update/tokens_per_second": tokens / update,
            "throughput/update/computed_tokens_per_second": computed / update,
            "throughput/update/padding_share": 1 - tokens / computed if computed else 0.0,
            "throughput/update/flops_per_second_per_device": flops / update / trainer.world_size,
            "time/waiting_estimate": (1 - plan.efficiency()) * update,
        }
        if self._peak:
            metrics["throughput/update/model_flops_utilization"] = flops / update / trainer.world_size / self._peak
        self._elapsed += update + between
        self._items = [self._items[0] + 1, self._items[1] + tokens]
        steps, seen = self._items
        self._rolling.update(time=self._elapsed, batches=steps, samples=steps, lengths=seen, flops=flops // trainer.world_size)
        rolling = self._rolling.compute()
        # Lightning's class is told the tokens of all ranks, so its per-device number of items is the global one.
        names = {"device/items_per_sec": "tokens_per_second", "device/mfu": "model_flops_utilization"}
        return metrics | {f"throughput/{ours}": float(rolling[theirs]) for theirs, ours in names.items() if theirs in rolling}


def _phases(trainer: "pl.Trainer") -> dict[str, float]:
    """Return the phases of the collection that came before the first update of an iteration, as the module logged them."""
    own = ("time/update", "time/between_updates", "time/waiting", "time/other_between_updates")
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("time/") and not name.startswith(own)}


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use so far, on a GPU by torch, else by this process.

    Args:
        device: Of the model.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes but on macOS


def trained_models(module: nn.Module) -> list[nn.Module]:
    """Return the scorers of a module that are trained: its policy and, where it has a trunk of its own, its critic.

    Args:
        module: Of any kind; without such attributes itself.
    """
    found = [getattr(module, name, None) for name in ("policy", "critic")]
    models = [model for model in found if isinstance(model, nn.Module)]
    return models or [module]


def flops_coefficients(model: nn.Module) -> tuple[int, int]:
    """Return P and A x n of a model: see :class:`ThroughputMonitor`.

    Args:
        model: A scorer, a transformers model, or any module (which counts as linear).
    """
    inner = getattr(model, "model", model)
    config = getattr(inner, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    embeddings = inner.get_input_embeddings() if isinstance(inner, PreTrainedModel) else None
    weight = getattr(embeddings, "weight", None)
    if isinstance(weight, torch.Tensor) and not getattr(text, "tie_word_embeddings", False):
        parameters -= weight.numel()  # a tied table is multiplied with, as the head
    heads = getattr(text, "num_attention_heads", 0) or 0
    head_dim = getattr(text, "head_dim", None) or (getattr(text, "hidden_size", 0) // heads if heads else 0)
    return parameters, heads * head_dim * (getattr(text, "num_hidden_layers", 0) or 0)


def step_flops(plan: BatchPlan, parameters: int, attention: int) -> int:
    """Return the model FLOPs of one optimizer step over all ranks.

    Args:
        plan: Of the mini-batch.
        parameters: P.
        attention: A x n.

    Example:
        >>> from lightning_rlbatch.functional import plan_mini_batch
        >>> step_flops(plan_mini_batch([3, 2], dp_size=1, max_tokens_per_rank=5), 10, 1)
        378
    """
    lengths = plan.lengths
    return 6 * parameters * int(lengths.sum()) + 6 * attention * int((lengths * lengths).sum())
