"""Make what a configuration names by ``class_path``."""

import functools
from collections.abc import Callable
from typing import Any


def callable_of(source: dict[str, Any], option: str) -> Callable[..., Any]:
    """Return what makes a configured object when it is called.

    Args:
        source: ``class_path`` of a class or function, and ``init_args``.
        option: Its name, for the error message.

    Raises:
        ValueError: There is no such class or function.
    """
    from lightning_rlbatch.data.sources import import_callable

    maker = import_callable(str(source.get("class_path")))
    if maker is None:
        raise ValueError(f"{option}.class_path={source.get('class_path')!r} is no import path of a class or function.")
    return functools.partial(maker, **(source.get("init_args") or {}))
