"""Rules about classes that are named without their module: misspelt ones, and loggers whose package is not installed."""

import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning_rlbatch
from lightning_rlbatch.cli.findings import Findings, note, refused
from lightning_rlbatch.cli.module_sources import module_source
from lightning_rlbatch.cli.run_config import RunConfig

HOLD_A_CLASS = ("advantage", "kl_reward", "policy_loss", "rollout_correction")  # given as a path alone, or with init_args
_OF_THE_TRAINER = {
    "callbacks": ("lightning.pytorch.callbacks", "lightning_rlbatch.callbacks"),
    "logger": ("lightning.pytorch.loggers",),
}
_LOGGERS_NEED = {
    "CometLogger": ("comet_ml",),
    "LitLogger": ("litlogger",),
    "MLFlowLogger": ("mlflow",),
    "NeptuneLogger": ("neptune",),
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "WandbLogger": ("wandb",),
}  # one of these packages


def check_short_names(run: RunConfig) -> Findings:
    """Find classes named without their module that are nearly known; a class of the user's own may be named so, once imported.

    Args:
        run: The configuration.
    """
    package = Path(lightning_rlbatch.__file__).parent
    for name in (*HOLD_A_CLASS, "rollout_engine"):
        files = package.glob("rollout/engine_config.py" if name == "rollout_engine" else "functional/*.py")
        known = {found for file in files for found in re.findall(r"^class ([A-Z]\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)}
        for path in _class_names(run.model.given.get(name)):
            yield from _check(name, path, known, "this package has no class")
    for name, modules in _OF_THE_TRAINER.items():
        sources = [source for module in modules if (source := module_source(module)) is not None]
        known = {found for source in sources for found in source.imports if found[0].isupper()}
        for path in _class_names(run.trainer.given.get(name)):
            yield from _check(name, path, known, "neither Lightning nor this package has a class")
    for path in _class_names(run.trainer.given.get("logger")):
        needed = _LOGGERS_NEED.get(path.removeprefix("lightning.pytorch.loggers."), ())
        if needed and not any(importlib.util.find_spec(package) for package in needed):
            name, missing = path.rpartition(".")[2], " or ".join(needed)
            text = f"{name} needs {missing}, which is not installed. Install it (pip install {needed[0]}), or log with CSVLogger."
            yield refused("logger", text=text)


def _class_names(value: Any) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        path = item.get("class_path") if isinstance(item, dict) else item
        if isinstance(path, str):
            yield path


def _check(option: str, path: str, known: Iterable[str], unknown: str) -> Findings:
    known = sorted(known)
    if not path.isidentifier() or path in known:
        return
    near = [found for found in known if found.lower().startswith(path.lower())] or difflib.get_close_matches(path, known, 1, 0.8)
    if near:
        yield refused(option, text=f"`{option}`: there is no class {path}. Did you mean {' or '.join(near)}?")
    else:
        yield note(option, text=f"`{option}`: {unknown} {path}. Is it one of yours, in the module of model or data?")
