"""Make what a configuration names."""

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    return functools.partial(maker, **_arguments(maker, source.get("init_args") or {}))


def _arguments(maker: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments as LightningCLI makes them of what a configuration says, a dtype of ``torch.float32`` for example."""
    jsonargparse: Any = importlib.import_module("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if isinstance(maker, type) else parser.add_function_arguments
    try:
        add(maker, fail_untyped=False)
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
        made = instantiate(parser.parse_object(given)).as_dict()
    except (jsonargparse.ArgumentError, ValueError):  # `maker` takes further ones, or says better what it does not take
        return given
    return {name: made.get(name, value) for name, value in given.items()}


def build_policy(source: Any) -> "PreTrainedModel":
    """Make the policy as the module would.

    Args:
        source: As configured: a folder, a hub name, an import path, or a ``class_path`` with ``init_args``.
    """
    from lightning_rlbatch.modules.model_sources import load_model

    logging: Any = importlib.import_module("transformers.utils.logging")  # its functions have no types
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of loading weights, in the middle of our output
    try:
        if not isinstance(source, dict):
            return load_model(source)
        made = callable_of(source, "policy")
        return load_model(lambda: _call_until_model(made))
    finally:
        if had_bars:
            logging.enable_progress_bar()


def _call_until_model(maker: Any) -> Any:
    """A ``class_path`` names the model's class, a function that makes it, or a class whose objects make it."""
    made = maker()
    return made() if callable(made) and not hasattr(made, "config") else made
