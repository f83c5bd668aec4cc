"""Say where a run has left its results, and leave those of ``predict``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from lightning_rlbatch.callbacks import PretrainedExport, RolloutLogger, RolloutRecorder


def outputs(trainer: "pl.Trainer") -> list[str]:
    """Return what a run has written, each with its folder, and the command that makes a report; only what is there.

    Args:
        trainer: After ``fit``.
    """
    found = [f"{what} {folder}" for what, folder in _folders(trainer) if any(folder.glob("*"))]
    folders = [getattr(logger, "log_dir", None) for logger in trainer.loggers]
    metrics = [Path(folder) for folder in folders if folder is not None and (Path(folder) / "metrics.csv").is_file()]
    return list(dict.fromkeys([*found, *(f"plots: rlbatch report {_shown(folder)}" for folder in metrics)]))


def _folders(trainer: "pl.Trainer") -> Iterator[tuple[str, Path]]:
    kinds = ((ModelCheckpoint, "checkpoints in"), (RolloutRecorder, "recorded rollouts in"), (RolloutLogger, "rollouts as text in"))
    for kind, what in (*kinds, (PretrainedExport, "transformers folder")):
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # a list that the Trainer sets in a connector
            dirpath = getattr(callback, "dirpath", None)
            if isinstance(callback, kind) and dirpath is not None:
                yield what, _shown(Path(dirpath))


def _shown(folder: Path) -> Path:
    """Return a path as short as it can be written from here."""
    try:
        return folder.absolute().relative_to(Path.cwd())
    except ValueError:
        return folder


@rank_zero_only
def print_outputs(trainer: "pl.Trainer") -> None:
    """Print one line of what a run has written, on rank 0.

    Args:
        trainer: After ``fit``.
    """
    found = [] if getattr(trainer, "fast_dev_run", False) else outputs(trainer)  # a trial run writes nothing
    if found:
        print("Written: " + "; ".join(found))


def write_predictions(trainer: "pl.Trainer", batches: list[Any] | None) -> None:
    """Write predictions, a JSON object per line, to ``predictions.jsonl`` beside the logs; on rank 0.

    Args:
        trainer: After ``predict``.
        batches: What it returned: rows, or a list of them per batch. None if a callback takes them instead.
    """
    folder = Path(trainer.log_dir or trainer.default_root_dir)  # rank 0 tells the others
    if batches is None or not trainer.is_global_zero:
        return
    rows = [row for batch in batches for row in (batch if isinstance(batch, list) else [batch])]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "predictions.jsonl"
    file.write_text("".join(json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"Written: {len(rows)} predictions in {_shown(file)}")
