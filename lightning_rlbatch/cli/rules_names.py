"""Rules about names and types: misspelt keys, other trainers' names, values of the wrong type."""

from collections.abc import Iterator
from typing import Any

from lightning_rlbatch.cli.config_file import ConfigFileError
from lightning_rlbatch.cli.findings import Findings, note, refused
from lightning_rlbatch.cli.run_config import RunConfig, Section
from lightning_rlbatch.cli.signatures import REQUIRED, Option, class_source
from lightning_rlbatch.cli.suggestions import suggest
from lightning_rlbatch.cli.translations import translate

_TOP_LEVEL = ("seed_everything", "ckpt_path", "config", "verbose", "weights_only", "dataloaders", "train_dataloaders", "val_dataloaders")


def check_names(run: RunConfig) -> Findings:
    """Find options that no class takes, required ones that are missing, and values of the wrong type."""
    for section in (run.model, run.data):
        if not section.class_path:
            yield refused(
                section.key, text=f"`{section.key}:` needs a `class_path`, for example lightning_rlbatch.{_example(section.key)}."
            )
    yield from check_unknown_names(run)
    for section in _sections(run):
        if section.options is not None:
            yield from _check_values(section, section.options)
        elif section.class_path and section.key != "trainer.strategy":
            yield note(section.key, text=f"The source of {section.class_path} was not found: its options are not checked here.")


def check_unknown_names(run: RunConfig) -> Findings:
    """Find options that no class takes, and say what was probably meant."""
    for key, value in run.others.items():
        if key in ("optimizer", "lr_scheduler"):
            yield refused(key, text=f"`{key}:` at top level is unknown: parameters are sharded first. Move it to model.init_args.{key}.")
        elif key not in _TOP_LEVEL:
            yield from _check_stray(run, key, value)
    for section in _sections(run):
        for name, value in section.given.items():
            if section.options is not None and name not in section.options:
                meant = suggest(name, section.options, run, value=value, within=section.key)
                yield refused(name, text=f"{section.name} has no option `{name}`.{meant}")
            elif isinstance(value, dict | list) and name != "rollout_engine":  # a section of its own
                for part in value if isinstance(value, list) else [value]:
                    yield from _check_part(run, part)


def refuse_unknown_names(run: RunConfig) -> None:
    """Raise for options that no class takes, where a command reads some options of a configuration only.

    Args:
        run: The configuration.

    Raises:
        ConfigFileError: With all of them.
    """
    texts = [finding.text for finding in check_unknown_names(run)]
    if texts:
        raise ConfigFileError("\n".join(texts))


def _sections(run: RunConfig) -> tuple[Section, ...]:
    return run.model, run.data, run.strategy, run.trainer, run.engine


def _check_stray(run: RunConfig, key: str, value: Any) -> Findings:
    """Say what a key outside of the sections' arguments means: another trainer's name, or a misspelt one.

    A section of another trainer, such as ``actor_rollout_ref``, is taken apart: each of its options that has a counterpart is named.
    """
    leaves = list(_leaves(key, value))
    known = [(path, leaf) for path, leaf in leaves if isinstance(value, dict) and translate(path, leaf) is not None]
    for path, leaf in known:
        yield refused(path, text=f"There is no option `{path}`.{suggest(path, (), run, value=leaf)}")
    if not known:
        place = "top-level key" if "." not in key else "option"
        yield refused(key, text=f"There is no {place} `{key}`.{suggest(key, ['model', 'data', 'trainer', *_TOP_LEVEL], run, value=value)}")
    elif len(known) < len(leaves):
        others = ", ".join(path.removeprefix(f"{key}.") for path, _ in leaves if path not in dict(known))
        yield refused(key, text=f"There is no top-level key `{key}`, and nothing here is called {others}: drop them.")


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{path}.{name}", inner)


def _check_values(section: Section, options: dict[str, Option]) -> Findings:
    for name, value in section.given.items():
        if name not in options or isinstance(value, dict | list):
            continue
        expected = _mismatch(options[name], value)
        if expected is not None:
            yield refused(name, text=f"`{name}` must be {expected} but is {value!r}.")
    for name, option in options.items():
        if option.default is REQUIRED and name not in section.given:
            yield refused(name, text=f"{section.name} needs `{name}`. Add it under {section.key}.init_args.")


def _check_part(run: RunConfig, value: Any) -> Findings:
    """Find misspelt options of a class of this package that an option holds, such as a policy loss or a callback."""
    path, given = (value.get("class_path"), value.get("init_args")) if isinstance(value, dict) else (None, None)
    if not isinstance(path, str) or not path.startswith("lightning_rlbatch.") or not isinstance(given, dict):
        return
    source = class_source(path)
    known = None if source is None else source.options
    for name in given:
        if known is not None and name not in known:
            yield refused(name, text=f"{path.rpartition('.')[2]} has no option `{name}`.{suggest(name, known, run, value=given[name])}")


def _mismatch(option: Option, value: Any) -> str | None:
    """Return what is expected instead, None if the value fits or the annotation is beyond this check."""
    if option.choices is not None:
        return None if value in option.choices else "one of " + ", ".join(map(repr, option.choices))
    types = option.types
    if types is None:
        return None
    # YAML has no way to write an integer as text but quotes, which LightningCLI reads as a number where one is wanted.
    if isinstance(value, str) and str not in types:
        value = _unquoted(value)
    if str in types and isinstance(value, int | float):
        return None  # on the command line LightningCLI takes 2024 as text where text is wanted
    fits = isinstance(value, types) and not (isinstance(value, bool) and bool not in types)
    fits = fits or (float in types and isinstance(value, int) and not isinstance(value, bool))
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return None if fits else " or ".join(words[kind] for kind in types)


def _unquoted(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _example(key: str) -> str:
    return "PPOModule" if key == "model" else "RolloutDataModule"
