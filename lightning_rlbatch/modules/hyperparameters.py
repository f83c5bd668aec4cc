"""Describe the arguments of a module by plain values, so that ``load_from_checkpoint`` makes it again in a fresh process."""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters

_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"  # what Lightning trusts to turn descriptions into objects when it loads


class _Unknown(Exception):  # noqa: N818 - control flow inside this file, not an error
    """A value cannot be described."""


def hyperparameters(module: Any, frame: FrameType | None) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that a module was made with, as plain values that a checkpoint may hold.

    LightningCLI's configuration is taken as it is. Otherwise numbers and texts stay, functions and classes become import paths,
    dataclass instances and ``functools.partial`` of classes become ``class_path`` with ``init_args``: the form of configuration files.
    An argument in whose place the class defines a method of the same name, such as ``policy_loss``, is left out.

    Args:
        module: The module, in its ``__init__``.
        frame: The frame of that ``__init__``.

    Returns:
        The arguments, and the names of those without such a form (a lambda, a function of the script that runs, a model): they have to be
        passed to ``load_from_checkpoint`` again.
    """
    given = _given_hyperparameters.get()
    if given is not None:
        return {name: value for name, value in given.items() if not _defines(type(module), name)}, []
    arguments: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is module:
        names = inspect.getargvalues(frame)
        own = {name: names.locals[name] for name in names.args if name != "self"}
        arguments = {**arguments, **(names.locals[names.keywords] if names.keywords else {}), **own}  # outer classes win
        frame = frame.f_back
    plain, unknown = {}, []
    for name, value in arguments.items():
        if _defines(type(module), name):
            continue
        try:
            plain[name] = describe(value)
        except _Unknown:
            unknown.append(name)
    return {**plain, "_instantiator": _INSTANTIATOR}, unknown


def _defines(kind: type, name: str) -> bool:
    """Whether a class defines what an argument of that name would say, as a method ``policy_loss`` does; not what Lightning defines."""
    base = next((base for base in kind.__mro__ if name in vars(base)), object)
    return callable(inspect.getattr_static(kind, name, None)) and not base.__module__.startswith(("lightning.", "torch."))


def required_arguments(kind: type) -> set[str]:
    """Return the names of the arguments without a default of a class.

    Args:
        kind: Any class; one whose ``__init__`` takes ``**kwargs`` hands them to its next base.
    """
    required: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        named = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
        required |= {item.name for item in named if item.default is item.empty}
        if not any(item.kind is item.VAR_KEYWORD for item in parameters):
            break
    return required


def describe(value: Any) -> Any:
    """Return a plain value that stands for another one.

    Args:
        value: Anything.

    Raises:
        _Unknown: It has no plain form.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: describe(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        arguments = {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {"class_path": _import_path(type(value)), "init_args": arguments}
    if isinstance(value, functools.partial) and isinstance(value.func, type) and not value.args:
        return {"class_path": _import_path(value.func), "init_args": describe(value.keywords)}
    if callable(value):
        return _import_path(value)
    raise _Unknown


def _import_path(value: Any) -> str:
    path = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise _Unknown from None
    if found is not value or module == "__main__":
        raise _Unknown
    return path
