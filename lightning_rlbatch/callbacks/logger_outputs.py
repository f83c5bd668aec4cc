"""Hand a table, histograms and pictures to whatever experiment loggers take them."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import WandbLogger


def log_table(logger: Any, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
    """Log a table to a logger that takes tables or text; others get nothing.

    Args:
        logger: A Lightning logger. One with ``log_table`` or ``log_text`` (W&B) gets columns and rows; one whose ``experiment`` has
            ``add_text`` (TensorBoard) a Markdown table that shows every character as it is.
        key: Name of the table.
        columns: Headings.
        rows: A value per column.
        step: Optimizer step.
    """
    log = getattr(logger, "log_table", None) or getattr(logger, "log_text", None)
    if log is not None:
        log(key=key, columns=list(columns), data=[list(row) for row in rows], step=step)
        return
    add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
    if add_text is not None:
        add_text(key, markdown_table(columns, rows), step)


def log_histogram(logger: Any, key: str, values: Sequence[float], step: int) -> None:
    """Log a histogram to a logger that makes them of values; others get nothing.

    Args:
        logger: A Lightning logger: W&B's, or one whose ``experiment`` has ``add_histogram`` (TensorBoard).
        key: Name of the histogram.
        values: At least one finite number.
        step: Optimizer step.
    """
    if isinstance(logger, WandbLogger):
        wandb = importlib.import_module("wandb")  # there, or the logger would not be
        logger.log_metrics({key: wandb.Histogram(list(values))}, step=step)
        return
    add_histogram = getattr(getattr(logger, "experiment", None), "add_histogram", None)
    if add_histogram is not None:
        add_histogram(key, np.asarray(values, dtype=np.float64), step)


def log_picture(logger: Any, key: str, path: Path, step: int) -> None:
    """Log a picture to a logger that takes pictures; others get nothing.

    Args:
        logger: A Lightning logger: one with ``log_image`` (W&B), or one whose ``experiment`` has ``add_image`` (TensorBoard).
        key: Name of the picture.
        path: PNG file.
        step: Optimizer step.
    """
    log_image = getattr(logger, "log_image", None)
    if log_image is not None:
        log_image(key=key, images=[str(path)], step=step)
        return
    add_image = getattr(getattr(logger, "experiment", None), "add_image", None)
    if add_image is not None:
        pixels = importlib.import_module("matplotlib.image").imread(path)[..., :3]  # has drawn it; [height, width, 3] in 0 to 1
        add_image(key, pixels, step, dataformats="HWC")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table whose cells show their text to the letter: markup, bars and line ends included.

    Args:
        columns: Headings.
        rows: A value per column; None becomes a dash, floating-point numbers get four digits.

    Example:
        >>> print(markdown_table(["text", "reward"], [["a|b", None]]))
        | text | reward |
        | --- | --- |
        | a&#124;b | - |
    """
    lines = [list(columns), ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    escaped = re.sub(r"[!-/:-@\[-`{-~]", lambda match: f"&#{ord(match[0])};", str(value))  # all ASCII punctuation, which may mean something
    return "<br>".join(escaped.split("\n"))
