"""Run our part of a hook that a subclass overrides, whether or not it calls ``super()``."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl

_HOOKS = (
    "configure_callbacks",
    "on_before_optimizer_step",
    "on_load_checkpoint",
    "on_predict_epoch_end",
    "on_predict_epoch_start",
    "on_predict_start",
    "on_save_checkpoint",
    "on_train_batch_end",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_start",
    "on_validation_end",
    "on_validation_epoch_end",
    "on_validation_epoch_start",
    "on_validation_start",
)


class KeepsOwnHooks(pl.LightningModule):
    """Lets subclasses override Lightning's hooks as in any LightningModule, whose hooks do nothing and are seldom called by ``super()``.

    Ours do something: without them gradients are not clipped, engines sample with old weights, or one rank stops alone. So our part runs
    behind the subclass's, unless that has called it.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap the hooks of the class."""
        super().__init_subclass__(**kwargs)
        for name in _HOOKS:
            hook = cls.__dict__.get(name)
            if not callable(hook):
                continue
            if _is_ours(cls):
                setattr(cls, name, _counted(name, hook))
            elif (own := _nearest_of_ours(cls, name)) is not None:
                setattr(cls, name, _completed(name, hook, own))


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("lightning_rlbatch.")


def _nearest_of_ours(cls: type, name: str) -> Callable[..., Any] | None:
    return next((base.__dict__[name] for base in cls.__mro__[1:] if _is_ours(base) and name in base.__dict__), None)


def _calls(module: Any) -> dict[str, int]:
    """Return how often each of our hooks has run; kept beside what torch's modules watch over."""
    calls: dict[str, int] = module.__dict__.setdefault("_own_hook_calls", {})
    return calls


def _counted(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _calls(self)[name] = _calls(self).get(name, 0) + 1
        return hook(self, *args, **kwargs)

    return counted


def _completed(name: str, hook: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def completed(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _calls(self).get(name, 0)
        result = hook(self, *args, **kwargs)
        if _calls(self).get(name, 0) != before:
            return result
        ours = own(self, *args, **kwargs)
        if name == "configure_callbacks":
            return [*(result if isinstance(result, Sequence) else [] if result is None else [result]), *ours]
        return result

    return completed
