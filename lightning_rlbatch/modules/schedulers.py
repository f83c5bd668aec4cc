"""Learning-rate schedulers under manual optimization: each advances when its configuration says, on all ranks alike."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override


@dataclasses.dataclass(frozen=True)
class Watched:
    """What a scheduler needs to know before it advances; Lightning drops it under manual optimization.

    Attributes:
        scheduler: A ``ReduceLROnPlateau``, or one like it.
        monitor: Name of a logged metric.
        strict: Whether a metric that was not logged is an error.
    """

    scheduler: Any
    monitor: str
    strict: bool = True


class AdvancesSchedulers(pl.LightningModule):
    """Reads what ``configure_optimizers`` of a subclass returns, and advances its schedulers; every form that Lightning knows is one.

    ``interval: step`` (the default here) counts optimizer steps, ``interval: epoch`` iterations, and every ``frequency``-th one advances
    the scheduler. One that watches a metric (``ReduceLROnPlateau``) advances by epoch unless told otherwise, behind the validation.
    """

    _watched: tuple[Watched, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let what a subclass configures be read before Lightning drops a part of it."""
        super().__init_subclass__(**kwargs)
        configure = cls.configure_optimizers
        if not getattr(configure, "is_read", False):
            cls.configure_optimizers = _read(configure)  # type: ignore[method-assign, assignment]  # wrapped, the same

    def advance_schedulers(self, *, skipped: bool, is_last_step: bool) -> None:
        """Advance what is due after an optimizer step.

        Args:
            skipped: Whether the step did not happen: what counts steps stays as it is.
            is_last_step: Whether it was the last one of the epoch. Checkpoints of its end then hold the schedulers of the next one.
        """
        for config in self.trainer.lr_scheduler_configs:
            if _watched_by(self, config.scheduler) is not None:
                continue
            by_step = config.interval == "step"
            is_end = not skipped if by_step else is_last_step
            if is_end and _is_due(config, self.trainer.global_step if by_step else self.trainer.current_epoch + 1):
                self.lr_scheduler_step(config.scheduler, None)


class PlateauSteps(Callback):
    """Advances the schedulers that watch a metric, when it has been logged; before any checkpoint of the same moment is saved."""

    def __init__(self) -> None:
        self._stepped_in: dict[int, int] = {}  # number of a scheduler to the epoch in which it advanced last

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"stepped_in": dict(self._stepped_in)} if self._stepped_in else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stepped_in = dict(state_dict["stepped_in"])

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int) -> None:
        for config, watched in _pairs(trainer, pl_module, "step"):
            if _is_due(config, trainer.global_step):
                self._step(trainer, watched)

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        # Others are in the middle of an epoch, or of no epoch.
        if trainer.state.fn == TrainerFn.FITTING and trainer.is_last_batch and not trainer.sanity_checking:
            self._end_epoch(trainer, pl_module, may_miss=True)

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._end_epoch(trainer, pl_module, may_miss=False)

    def _end_epoch(self, trainer: "pl.Trainer", module: "pl.LightningModule", *, may_miss: bool) -> None:
        for number, (config, watched) in enumerate(_pairs(trainer, module, "epoch")):
            is_new = self._stepped_in.get(number) != trainer.current_epoch
            if is_new and _is_due(config, trainer.current_epoch + 1) and not (may_miss and watched.monitor not in trainer.callback_metrics):
                self._stepped_in[number] = trainer.current_epoch
                self._step(trainer, watched)

    def _step(self, trainer: "pl.Trainer", watched: Watched) -> None:
        metrics = trainer.callback_metrics
        if watched.monitor not in metrics:
            text = (
                f"{type(watched.scheduler).__name__} watches {watched.monitor!r}, which was not logged. Logged: {sorted(metrics)}. Log it,"
                " watch one of these, or give the scheduler a frequency at which it is there (check_val_every_n_epoch)."
            )
            if watched.strict:
                raise MisconfigurationException(text)
            rank_zero_warn(text)
            return
        # Rank 0's value on every rank: a metric logged without sync_dist would give each its own learning rate.
        value = trainer.strategy.broadcast(float(metrics[watched.monitor]))
        trainer.lightning_module.lr_scheduler_step(watched.scheduler, value)


def _pairs(trainer: "pl.Trainer", module: "pl.LightningModule", interval: str) -> list[tuple[LRSchedulerConfig, Watched]]:
    found = [(config, _watched_by(module, config.scheduler)) for config in trainer.lr_scheduler_configs if config.interval == interval]
    return [(config, watched) for config, watched in found if watched is not None]


def _watched_by(module: Any, scheduler: Any) -> Watched | None:
    return next((watched for watched in module._watched if watched.scheduler is scheduler), None)


def _is_due(config: LRSchedulerConfig, count: int) -> bool:
    return count % config.frequency == 0


# -- what `configure_optimizers` returns ---------------------------------------------------------------------------------------------


def _read(configure: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``configure_optimizers``: keep what Lightning drops, refuse what the module cannot run."""

    @functools.wraps(configure)
    def configure_optimizers(self: AdvancesSchedulers) -> Any:
        configured = _completed(self, configure(self))
        _require_one_optimizer(self, configured)
        kept = {id(scheduler["scheduler"]) for scheduler in _schedulers(configured)}
        self._watched = tuple(watched for watched in self._watched if id(watched.scheduler) in kept)  # others are of an earlier run
        return configured

    configure_optimizers.is_read = True  # type: ignore[attr-defined]  # a mark
    return configure_optimizers


def _completed(module: AdvancesSchedulers, configured: Any) -> Any:
    """Return a configuration of the same form, in which each scheduler says when it advances."""
    if isinstance(configured, Mapping):
        if configured.get("lr_scheduler") is None:
            return {key: value for key, value in configured.items() if key != "lr_scheduler"}
        scheduler = _scheduler(module, configured["lr_scheduler"], configured.get("monitor"))
        return {key: value for key, value in configured.items() if key != "monitor"} | {"lr_scheduler": scheduler}
    if _is_two_lists(configured):
        schedulers = configured[1] if isinstance(configured[1], list) else [configured[1]]
        return configured[0], [_scheduler(module, scheduler, None) for scheduler in schedulers]
    if isinstance(configured, list | tuple):
        return [_completed(module, one) for one in configured]
    return configured


def _schedulers(configured: Any) -> list[dict[str, Any]]:
    """Return the schedulers' dictionaries of a completed configuration."""
    if isinstance(configured, Mapping):
        return [configured["lr_scheduler"]] if "lr_scheduler" in configured else []
    if _is_two_lists(configured):
        return list(configured[1])
    return [scheduler for one in configured for scheduler in _schedulers(one)] if isinstance(configured, list | tuple) else []


def _is_two_lists(configured: Any) -> bool:
    return isinstance(configured, list | tuple) and len(configured) == 2 and isinstance(configured[0], list)


def _scheduler(module: AdvancesSchedulers, given: Any, monitor: str | None) -> dict[str, Any]:
    """Return a scheduler's configuration without the keys that Lightning would warn of; the module keeps them.

    Args:
        module: The module.
        given: A scheduler, or a dictionary with one.
        monitor: Stands beside the optimizer, as Lightning allows.

    Raises:
        MisconfigurationException: No such interval, frequency or key; or a metric to watch is missing.
    """
    options = {"scheduler": given} if not isinstance(given, Mapping) else dict(given)
    allowed = {field.name for field in dataclasses.fields(LRSchedulerConfig)}
    if "scheduler" not in options or not options.keys() <= allowed:
        raise MisconfigurationException(
            f"A dictionary with a learning-rate scheduler has the key 'scheduler', and others out of {sorted(allowed)}; got"
            f" {sorted(map(str, options))}."
        )
    scheduler, monitor = options["scheduler"], options.pop("monitor", None) or monitor
    strict, watches = options.pop("strict", True), options.pop("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    name = type(scheduler).__name__
    if watches and _watched_by(module, scheduler) is None:
        monitor = monitor or getattr(scheduler, "monitor", None)  # of `lightning.pytorch.cli.ReduceLROnPlateau`
        if monitor is None:
            raise MisconfigurationException(
                f"{name} needs the name of a metric to watch. In YAML use class_path: lightning.pytorch.cli.ReduceLROnPlateau with"
                " init_args: {monitor: val/reward/mean}; in configure_optimizers return {'optimizer': ..., 'lr_scheduler': {'scheduler':"
                " ..., 'monitor': 'val/reward/mean'}}."
            )
        module._watched = (*module._watched, Watched(scheduler, monitor, strict))
    options.setdefault("interval", "epoch" if watches else "step")
    options.setdefault("frequency", 1)
    if options["interval"] not in ("step", "epoch"):
        raise MisconfigurationException(f"The interval of {name} must be 'step' or 'epoch' but is {options['interval']!r}.")
    if not isinstance(options["frequency"], int) or options["frequency"] < 1:
        raise MisconfigurationException(f"The frequency of {name} must be a whole number of at least 1 but is {options['frequency']!r}.")
    return options


def _require_one_optimizer(module: AdvancesSchedulers, configured: Any) -> None:
    if isinstance(configured, list | tuple):
        optimizers = configured[0] if _is_two_lists(configured) else configured
    else:
        optimizers = [] if configured is None else [configured]
    if len(optimizers) != 1:
        raise MisconfigurationException(
            f"configure_optimizers of {type(module).__name__} must return one optimizer but returned {len(optimizers)}: a mini-batch is one"
            " optimizer step, which counts once. Give one optimizer several parameter groups with options of their own (optimizer_groups)."
        )
