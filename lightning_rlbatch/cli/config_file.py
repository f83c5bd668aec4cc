"""Read a LightningCLI configuration, with its command-line overrides, into plain dictionaries without importing anything it names."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_rlbatch.cli.translations import translate

_SHORT = {"-c": "--config"}


class ConfigFileError(ValueError):
    """A configuration that cannot be read at all; the message says which file or argument, and what to do."""


class UnexpectedArgumentError(ConfigFileError):
    """An argument that LightningCLI would not take either."""


# YAML 1.2 numbers: `1e-3` is a float, as LightningCLI reads it, where PyYAML sees text.
yaml: Any = importlib.import_module("yaml")  # it has no types of its own
_Loader: Any = type("_Loader", (yaml.SafeLoader,), {})
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def parse_value(text: str) -> Any:
    """Return the Python value of a piece of YAML; text that is no YAML stands for itself.

    Args:
        text: Such as ``3``, ``1e-3``, ``[a, b]`` or ``lightning_rlbatch.SFTModule``.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def read_config(arguments: Sequence[str]) -> dict[str, Any]:
    """Merge what ``--config`` files and ``--key=value`` arguments say, later ones over earlier ones, as LightningCLI does.

    Args:
        arguments: Command line after the subcommand, for example ``["--config", "run.yaml", "--data.init_args.seed=1"]``. Keys may
            leave ``init_args`` out.

    Returns:
        Nested dictionaries; classes are ``{"class_path": ..., "init_args": {...}}``.

    Raises:
        ConfigFileError: A file is missing or is not a mapping in YAML, an argument has no value, or there is no configuration at all.
    """
    config: dict[str, Any] = {}
    for key, text in _pairs(arguments):
        if key == "config":
            _merge(config, _read_file(Path(text)))
        else:
            appending = key.endswith("+")
            _set(config, key.removesuffix("+").split("."), parse_value(text), appending)
    if not config:
        raise ConfigFileError("No configuration given. Pass --config run.yaml.")
    for key in ("model", "data", "trainer"):
        _resolve(config, key)
    strategy = config.get("trainer")
    if isinstance(strategy, dict):
        _resolve(strategy, "strategy")
    return config


def _pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = _SHORT.get(argument, argument).partition("=")
        if not name.startswith("--"):
            meant = translate(name, value) if equals else None
            raise UnexpectedArgumentError(
                f"Expected an option that begins with -- but got {argument!r}." + (f" {meant}" if meant is not None else "")
            )
        if not equals:
            following = next(rest, None)
            if following is None:
                raise ConfigFileError(f"{name} needs a value, as {name}=VALUE or {name} VALUE.")
            value = following
        pairs.append((name[2:], value))
    return pairs


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigFileError(f"There is no configuration file {path} in {Path.cwd()}. Check the path of --config.")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigFileError(f"{path} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigFileError(f"{path} must hold `model:`, `data:` and `trainer:` sections but holds {type(content).__name__}.")
    for subcommand in ("fit", "validate"):  # a file for `rlbatch --config FILE fit` has its sections one level down
        if isinstance(content.get(subcommand), dict) and "model" not in content:
            return dict(content[subcommand])
    return content


def _merge(target: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        old = target.get(key)
        same_class = not isinstance(value, dict) or not isinstance(old, dict) or value.get("class_path") in (None, old.get("class_path"))
        if isinstance(old, dict) and isinstance(value, dict) and same_class:
            _merge(old, value)
        else:
            target[key] = value


def _set(config: dict[str, Any], keys: list[str], value: Any, appending: bool) -> None:
    node = config
    for depth, key in enumerate(keys):
        if "class_path" in node and key not in ("class_path", "init_args", "dict_kwargs"):
            node = node.setdefault("init_args", {})
        last = depth == len(keys) - 1
        if not last:
            child = node.get(key)
            if isinstance(child, str):  # a class by its name alone gets its first argument
                child = node[key] = {"class_path": child, "init_args": {}}
            if not isinstance(child, dict):
                child = node[key] = {}
            node = child
        elif appending:
            old = node.get(key)
            node[key] = [*(old if isinstance(old, list) else []), *(value if isinstance(value, list) else [value])]
        elif isinstance(node.get(key), dict) and "class_path" in node[key] and isinstance(value, str):
            node[key] = {"class_path": value, "init_args": {}}
        else:
            node[key] = value


def _resolve(config: dict[str, Any], key: str) -> None:
    """Turn a file name into its content, and a class name alone into a class without arguments."""
    value = config.get(key)
    if isinstance(value, str) and value.endswith((".yaml", ".yml")):
        config[key] = _read_file(Path(value))
    elif isinstance(value, str) and key != "trainer":
        config[key] = {"class_path": value, "init_args": {}}
