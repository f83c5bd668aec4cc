"""Say what was meant by an option that its class does not have."""

import difflib
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning_rlbatch
from lightning_rlbatch.cli.run_config import RunConfig, Section
from lightning_rlbatch.cli.signatures import class_source
from lightning_rlbatch.cli.translations import translate

_DEFAULT_CLASSES = {"model": "PPOModule", "data": "RolloutDataModule", "trainer.strategy": "RLBatchFSDPStrategy"}
_HELD_BY = {"PolicyLoss": "policy_loss", "AdvantageEstimator": "advantage", "KLController": "kl_reward"}


def suggest(name: str, known: Iterable[str], run: RunConfig, *, value: Any = None, within: str = "") -> str:
    """Return a sentence about the option that was probably meant, with a space before it.

    Args:
        name: As written; with its path where its section is unknown, too.
        known: Options that its class has.
        run: The configuration.
        value: That it is set to.
        within: Section in which it stands, such as ``data``.
    """
    bare, known, elsewhere = name.rpartition(".")[2], list(known), places(run)
    entry = None if "." not in name and bare in elsewhere else translate(name, value)
    if entry is not None:
        paths = [elsewhere[word] for word in re.findall(r"\w+", entry.ours) if word in elsewhere]
        away = [path for path in dict.fromkeys(paths) if path.partition(".init_args")[0] != within and "`" not in path]
        return f" {entry}" + (f" Written {' or '.join(away)}." if away and not any(path in entry.ours for path in away) else "")
    if bare in elsewhere:
        return f" It is {elsewhere[bare]}."
    close = difflib.get_close_matches(bare, known, 1)
    if close:
        return f" Did you mean `{close[0]}`?"
    far = difflib.get_close_matches(bare, elsewhere, 1, cutoff=0.75)
    if far:
        return f" Did you mean {elsewhere[far[0]]}?"
    return f" It has: {', '.join(known)}." if known else ""


def places(run: RunConfig) -> dict[str, str]:
    """Return where each option of every class that a run may use is written: name -> ``data.init_args.mini_batch_size``.

    Args:
        run: The configuration; its own classes come first, those of this package after them.
    """
    found: dict[str, str] = {}
    for section in (run.data, run.model, run.strategy, run.trainer):
        options = section.options or _default_options(section)
        prefix = section.key if section.key == "trainer" else f"{section.key}.init_args"
        found = {name: f"{prefix}.{name}" for name in options} | found
    return _options_of_parts() | found


def _default_options(section: Section) -> Iterable[str]:
    source = class_source(_DEFAULT_CLASSES[section.key]) if section.key in _DEFAULT_CLASSES else None
    return () if source is None else source.options or ()


@functools.cache
def _options_of_parts() -> dict[str, str]:
    """Return the options of the classes that an option of the module holds, such as ``clip_low`` of ``PPOClip``."""
    package = Path(lightning_rlbatch.__file__).parent
    classes = {
        name: f"functional.{name}"
        for file in sorted(package.glob("functional/*.py"))
        for name in re.findall(r"^class ([A-Z]\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    classes |= {name: f"rollout.{name}" for name in ("TransformersEngineConfig", "VLLMEngineConfig")}
    classes |= {"RolloutCorrection": "RolloutCorrection"}
    found: dict[str, str] = {}
    for name, path in classes.items():
        source = class_source(f"lightning_rlbatch.{path}")
        if source is None or source.options is None:
            continue
        held = next((option for base, option in _HELD_BY.items() if base in source.ancestors), None)
        held = "rollout_engine" if path.startswith("rollout.") else "rollout_correction" if path == name else held
        if held is not None:
            found = {option: f"`{option}` of {name}, which model.init_args.{held} takes" for option in source.options} | found
    return found
