"""Read a LightningCLI configuration, with its command-line overrides, into plain dictionaries without importing anything it names."""

import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

from lightning_rlbatch.cli.imports import is_import_path
from lightning_rlbatch.cli.signatures import part_source
from lightning_rlbatch.cli.translations import translate

_SHORT = {"-c": "--config"}
SUBCOMMANDS = ("fit", "validate", "predict")
"""Commands that run a configuration."""


class ConfigFileError(ValueError):
    """A configuration that cannot be read at all; the message says which file or argument, and what to do."""


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
        Nested dictionaries; classes are ``{"class_path": ..., "init_args": {...}}``. A class that takes another one's place keeps those
        arguments that it takes too.

    Raises:
        ConfigFileError: A file is missing or is not a mapping in YAML, an argument has no value, or there is no configuration at all.
    """
    config: dict[str, Any] = {}
    for key, text in _pairs(arguments):
        if key == "config":
            _update(config, _configuration(text))
        else:
            appending = key.endswith("+")
            _set(config, key.removesuffix("+").split("."), parse_value(text), appending)
    if not config:
        raise ConfigFileError("No configuration given. Pass --config run.yaml.")
    for section, key in ((config, "model"), (config, "data"), (config.get("trainer"), "strategy")):
        if isinstance(section, dict) and isinstance(section.get(key), str):  # a class by its name alone
            section[key] = {"class_path": section[key], "init_args": {}}
    return config


def refuse_missing_files(arguments: Sequence[str]) -> None:
    """Raise if a file of a command line is not there, whatever else the command line says.

    Args:
        arguments: Command line.

    Raises:
        ConfigFileError: A file that ``--config`` names is missing or cannot be read, or has its sections one level down.
    """
    command = arguments[0] if arguments else ""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        following = arguments[index + 1 : index + 2]
        if _SHORT.get(name, name) != "--config" or not (equals or following):
            continue
        text = value if equals else following[0]
        content = _read(text)
        if command in SUBCOMMANDS and _is_below(content, command):
            raise ConfigFileError(f"{text} has its sections under `{command}:`. Write rlbatch --config {text} {command}")


def _pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = _SHORT.get(argument, argument).partition("=")
        if not name.startswith("--"):
            meant = translate(name, value) if equals else f"Write --config {argument}." if name.endswith((".yaml", ".yml")) else None
            raise ConfigFileError(
                f"Expected an option that begins with -- but got {argument!r}." + (f" {meant}" if meant is not None else "")
            )
        if not equals:
            following = next(rest, None)
            if following is None:
                raise ConfigFileError(f"{name} needs a value, as {name}=VALUE or {name} VALUE.")
            value = following
        pairs.append((name[2:], value))
    return pairs


# -- files -------------------------------------------------------------------------------------------------------------------------


def _configuration(text: str) -> dict[str, Any]:
    """Return the sections of what ``--config`` names; a file for ``rlbatch --config FILE fit`` has them one level down."""
    content = _read(text)
    return next((dict(content[command]) for command in SUBCOMMANDS if _is_below(content, command)), content)


def _read(text: str) -> dict[str, Any]:
    """Return what ``--config`` names: a file, or the configuration itself."""
    if not os.path.exists(text) and isinstance(content := parse_value(text), dict):
        return content
    return _read_file(Path(text))


def _is_below(content: dict[str, Any], subcommand: str) -> bool:
    return isinstance(content.get(subcommand), dict) and "model" not in content


def _read_file(path: Path) -> dict[str, Any]:
    content = _read_part(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigFileError(f"{path} must hold `model:`, `data:` and `trainer:` sections but holds {type(content).__name__}.")
    return content


def _read_part(path: Path) -> Any:
    """Return what is in a file: a section, a class, or a list of them."""
    if not path.is_file():
        what = f"{path} in {Path.cwd()} is a folder" if path.is_dir() else f"There is no configuration file {path} in {Path.cwd()}"
        raise ConfigFileError(f"{what}. Check the path.")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigFileError(f"{path} is not valid YAML: {error}") from None
    return _with_parts(content, path.parent)


def _with_parts(value: Any, folder: Path, key: str = "") -> Any:
    """Replace the names of files that hold a part by their content; they are looked for beside the file that names them."""
    if isinstance(value, dict):
        return {name: _with_parts(item, folder, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_parts(item, folder) for item in value]
    if _is_file_name(value) and (key in ("model", "data", "trainer", "strategy") or (folder / value).is_file()):
        return _read_part(folder / value)
    return value


def _is_file_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


# -- one over the other --------------------------------------------------------------------------------------------------------------


def _update(target: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        target[key] = _merged(target.get(key), value)


def _merged(old: Any, new: Any) -> Any:
    """Return what stands where ``new`` is said over ``old``: sections and arguments are merged, anything else is replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    result = _with_class(old, str(new["class_path"])) if "class_path" in new else dict(old)
    _update(result, new)
    return result


def _with_class(old: dict[str, Any], class_path: str) -> dict[str, Any]:
    """Return another class with those arguments of an old one that it takes; all of them if its source cannot tell."""
    arguments = old.get("init_args") or {}
    if class_path != old.get("class_path"):
        source = part_source(class_path)
        known = arguments if source is None or source.options is None else source.options
        arguments = {name: value for name, value in arguments.items() if name in known}
    return {"class_path": class_path, "init_args": arguments}


def _set(config: dict[str, Any], keys: list[str], value: Any, appending: bool) -> None:
    node = config
    for key in keys[:-1]:
        node = _arguments(node, key)
        child = node.get(key)
        if isinstance(child, list) and child:  # what follows is about the class that was added last
            node, key = {str(index): part for index, part in enumerate(child)}, str(len(child) - 1)
            child[-1] = node[key] = _class_of(child[-1])
        else:
            node[key] = _class_of(child)
        node = node[key]
    key = keys[-1]
    node = _arguments(node, key)
    old = node.get(key)
    if _is_file_name(value) and Path(value).is_file():
        value = _read_part(Path(value))
    if key == "class_path" and isinstance(value, str):
        node.update(_with_class(node, value))
    elif appending:
        before = old if isinstance(old, list) else [] if old is None or isinstance(old, bool) else [old]
        node[key] = [*before, *(value if isinstance(value, list) else [value])]
    elif isinstance(old, dict) and old.keys() & {"class_path", "init_args"} and isinstance(value, str) and _may_be_class(value):
        node[key] = _with_class(old, value)
    else:
        node[key] = _merged(old, value)


def _arguments(node: dict[str, Any], key: str) -> dict[str, Any]:
    """Return where a key belongs in a node: among the arguments, if that is a class."""
    if ("class_path" in node or "init_args" in node) and key not in ("class_path", "init_args", "dict_kwargs"):
        node["init_args"] = node.get("init_args") or {}
        return cast(dict[str, Any], node["init_args"])
    return node


def _class_of(value: Any) -> dict[str, Any]:
    """Return what can take arguments: a class by its name alone gets its first one."""
    if isinstance(value, str):
        return {"class_path": value, "init_args": {}}
    return value if isinstance(value, dict) else {}


def _may_be_class(text: str) -> bool:
    """Whether a text may name a class, rather than a folder, a hub name or one of several words."""
    return is_import_path(text) or (text.isidentifier() and text[0].isupper())
