"""Rules about names and types: misspelt keys, other trainers' names, values of the wrong type."""

import difflib
from collections.abc import Iterator
from typing import Any

from lightning_rlbatch.cli.annotations import is_known, misfit
from lightning_rlbatch.cli.config_file import ConfigFileError
from lightning_rlbatch.cli.findings import Findings, note, refused
from lightning_rlbatch.cli.imports import import_problem
from lightning_rlbatch.cli.run_config import RunConfig, Section
from lightning_rlbatch.cli.signatures import REQUIRED, Option, part_source
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
        elif section.class_path and section.key != "trainer.strategy" and import_problem(section.class_path) is None:  # else refused
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
            elif name != "rollout_engine":  # a section of its own
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
    keys = ("model", "data", "trainer", *_TOP_LEVEL)
    near = difflib.get_close_matches(key, keys, 1, 0.8) if isinstance(value, dict) else ()
    if near:  # what is below it is all right
        yield refused(key, text=f"There is no top-level key `{key}`. Did you mean `{near[0]}`?")
        return
    leaves = list(_leaves(key, value))
    known = [(path, leaf) for path, leaf in leaves if isinstance(value, dict) and translate(path, leaf) is not None]
    for path, leaf in known:
        yield refused(path, text=f"There is no option `{path}`.{suggest(path, (), run, value=leaf)}")
    if not known:
        place = "top-level key" if "." not in key else "option"
        yield refused(key, text=f"There is no {place} `{key}`.{suggest(key, keys, run, value=value)}")
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
        if name in options and name != "rollout_engine":  # a section of its own
            yield from _check_value(options[name], value)
    for name, option in options.items():
        if option.default is REQUIRED and name not in section.given:
            yield refused(name, text=f"{section.name} needs `{name}`. Add it under {section.key}.init_args.")


def _check_value(option: Option, value: Any, owner: str = "") -> Findings:
    expected = misfit(option.annotation, option.module, value)
    if expected is None and value is None and option.default is REQUIRED and "None" not in option.annotation:
        expected = "set"
    if expected is not None:
        yield refused(option.name, text=f"`{option.name}`{owner} must be {expected} but is {value!r}.")


def _check_part(run: RunConfig, value: Any) -> Findings:
    """Find misspelt options and values of the wrong type of a class that an option holds, such as a policy loss or a callback."""
    path, given = (value.get("class_path"), value.get("init_args")) if isinstance(value, dict) else (None, None)
    source = part_source(path) if isinstance(path, str) else None
    if source is None or source.options is None or not is_known(source.path):
        return
    name = str(path).rpartition(".")[2]
    given = given if isinstance(given, dict) else {}
    for option, inner in given.items():
        if option not in source.options:
            yield refused(option, text=f"{name} has no option `{option}`.{suggest(option, source.options, run, value=inner)}")
            continue
        yield from _check_value(source.options[option], inner, f" of {name}")
        for part in inner if isinstance(inner, list) else [inner]:
            yield from _check_part(run, part)
    # What makes other classes may add arguments of its own, and a misspelt one may be the one that is missing.
    if source.path.startswith("lightning_rlbatch.") and set(given) <= set(source.options):
        for option in source.options.values():
            if option.default is REQUIRED and option.name not in given:
                yield refused(option.name, text=f"{name} needs `{option.name}`. Add it to its init_args.")


def _example(key: str) -> str:
    return "PPOModule" if key == "model" else "RolloutDataModule"
