"""Show rollouts while training: as a table, in files, as numbers."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from rich import get_console
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_rlbatch.callbacks.logger_outputs import log_histogram, log_table
from lightning_rlbatch.callbacks.rollout_files import EXTRA, FileFormat, check_format, extra_text, write_rows, write_text
from lightning_rlbatch.callbacks.rollout_hooks import RolloutCallback, Rollouts
from lightning_rlbatch.data.recording import file_name, folder_name
from lightning_rlbatch.data.store import SAMPLE_ID, RolloutStore, RolloutTable
from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.distributed.reductions import gather_strings
from lightning_rlbatch.strategies.access import meshes_of

QUANTILES = {"min": 0.0, "p25": 0.25, "p50": 0.5, "p75": 0.75, "max": 1.0}
_SHOWN = ("prompt", "completion", "reward", "advantage", "num_response_tokens")


class RolloutLogger(RolloutCallback):
    """Print a few rollouts per iteration, write all of them to files, and describe their lengths and rewards.

    * Console (rank zero): a table of rank zero's first rollouts, and histograms of all rollouts' lengths and rewards.
    * ``dirpath``: every rank writes its rollouts to ``iteration_000003/rank_00001.jsonl`` or ``.parquet`` (``prompt``, ``completion``,
      ``reward``, ``advantage``, ``num_response_tokens``, ``sample_id``, ``group_id``, ``iteration``, and ``extra``: what reward functions
      told by ``log_extra``, if any did); rank zero writes ``iteration_000003/histograms.json``. :class:`ReplayDataModule` reads the folder.
    * Loggers (rank zero): quantiles, ``rollouts/length_p50`` and so on, to all of them; the table ``rollouts`` and the histograms
      ``rollouts/length`` and ``rollouts/reward`` to those that take them (TensorBoard, W&B, others with ``log_table`` or ``log_text``).

    The advantage of a rollout is the mean over its response tokens. Rollouts without a reward are not shown.

    Args:
        dirpath: Folder of the files; None writes none.
        file_format: Of the files: JSON lines, or Parquet (extra ``parquet``).
        every_n_iterations: Show every n-th iteration.
        max_rows: Most rollouts in a table; 0 prints nothing.
        max_text_length: Characters of a text in the console's table; the end is cut off.
        num_bins: Bins of a histogram on the console and in ``histograms.json``; loggers choose their own.

    Raises:
        ValueError: A number is out of range.
        ImportError: Parquet without pyarrow.

    Example::

        trainer = Trainer(strategy="rlbatch_fsdp", callbacks=[RolloutLogger("outputs/rollouts", file_format="parquet")])
    """

    def __init__(
        self,
        dirpath: str | None = None,
        *,
        file_format: FileFormat = "jsonl",
        every_n_iterations: int = 1,
        max_rows: int = 4,
        max_text_length: int = 200,
        num_bins: int = 8,
    ) -> None:
        for name, value, least in (
            ("every_n_iterations", every_n_iterations, 1),
            ("max_rows", max_rows, 0),
            ("max_text_length", max_text_length, 1),
            ("num_bins", num_bins, 1),
        ):
            if value < least:
                raise ValueError(f"Expected {name} to be at least {least} but got {value}.")
        check_format(file_format)
        if file_format != "jsonl" and dirpath is None:
            raise ValueError(f"file_format={file_format!r} has no effect without dirpath. Set dirpath, or drop it.")
        self.dirpath = dirpath
        self.file_format = file_format
        self.every_n_iterations = every_n_iterations
        self.max_rows = max_rows
        self.max_text_length = max_text_length
        self.num_bins = num_bins

    @override
    def on_rollout_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", rollouts: Rollouts) -> None:
        if rollouts.iteration % self.every_n_iterations:
            return
        meshes = meshes_of(trainer)
        histograms = rollout_histograms(rollouts.store.table, self.num_bins)
        extra = gather_extra(rollouts.store, meshes)
        # One phase: a tokenizer or a disk fails on one rank only, and the others must not go on alone.
        with fail_together(meshes.world_group, "logging rollouts"):
            writes = self.dirpath is not None and meshes.sp_rank == 0
            rows = rollout_rows(rollouts, None if writes else self.max_rows, extra) if writes or trainer.is_global_zero else []
            if self.dirpath is not None and writes:
                folder = Path(self.dirpath) / folder_name(rollouts.iteration)
                write_rows(folder / file_name(meshes.dp_rank, self.file_format), rows, self.file_format, with_extra=extra is not None)
                if trainer.is_global_zero:
                    write_text(folder / "histograms.json", json.dumps(histograms) + "\n")
            if trainer.is_global_zero:
                self._show(rollouts.iteration, rows[: self.max_rows], histograms)
                self._log(trainer, rows[: self.max_rows], rollouts.store.table)

    def _show(self, iteration: int, rows: Sequence[dict[str, Any]], histograms: dict[str, Any]) -> None:
        if not self.max_rows:
            return
        console = get_console()  # the one that Lightning's RichProgressBar draws on: it prints above a live bar
        console.print(rollout_table(rows, f"Rollouts of iteration {iteration}", self.max_text_length))
        for name, histogram in histograms.items():
            console.print(Text(f"{name}: {_describe(histogram, whole=name == 'length')}"), soft_wrap=True)

    def _log(self, trainer: "pl.Trainer", rows: Sequence[dict[str, Any]], table: RolloutTable) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(rollout_quantiles(table), step=trainer.global_step)
            if rows:
                shown = [*_SHOWN, *([EXTRA] if EXTRA in rows[0] else [])]
                texts = [{**row, EXTRA: extra_text(row)} for row in rows]
                log_table(logger, "rollouts", shown, [[row[name] for name in shown] for row in texts], trainer.global_step)
            for name, values in _columns(table).items():
                if values:
                    log_histogram(logger, f"rollouts/{name}", values, trainer.global_step)


def gather_extra(store: RolloutStore, meshes: Meshes) -> dict[int, dict[str, Any]] | None:
    """Tell every rank what reward functions logged of each rollout, wherever it was sampled; collective over all ranks.

    Args:
        store: Of this rank.
        meshes: Groups of the run.

    Returns:
        Columns by the rollout's id in the collection; None if nothing was logged on any rank.
    """
    told = gather_strings(json.dumps(list(store.extra.items()), default=str) if store.extra else "", meshes.world_group)
    rows = [row for text in told if text for row in json.loads(text)]
    return {int(index): columns for index, columns in rows} if rows else None


def rollout_rows(
    rollouts: Rollouts, max_rows: int | None = None, extra: Mapping[int, dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return this rank's rollouts as plain rows, by ascending ``sample_id``.

    Args:
        rollouts: What the hook got.
        max_rows: Most rows; None for all.
        extra: From :func:`gather_extra`.
    """
    prompts, samples = rollouts.prompts, rollouts.store.samples
    if max_rows is not None:
        samples = samples.select(range(min(max_rows, samples.num_samples)))
    size = prompts.rollouts_per_prompt
    samples = samples.to("cpu")
    masks = samples.split_per_sample("response_mask")
    parts = samples.split_per_sample("advantages")
    rows = []
    for index, reward, (prompt, completion), mask, part in zip(
        samples[SAMPLE_ID].tolist(), samples["reward"].tolist(), rollouts.texts(samples.num_samples), masks, parts
    ):
        position = prompts.positions[index // size]
        advantage = float(part[mask].double().mean()) if bool(mask.any()) else 0.0
        rows.append(
            {
                "iteration": rollouts.iteration,
                "group_id": position,
                "sample_id": position * size + index % size,
                "prompt": prompt,
                "completion": completion,
                "reward": reward if math.isfinite(reward) else None,
                "advantage": advantage if math.isfinite(advantage) else None,
                "num_response_tokens": int(mask.sum()),
                **({} if extra is None else {EXTRA: extra.get(index, {})}),
            }
        )
    return rows


def rollout_table(rows: Sequence[dict[str, Any]], title: str, max_text_length: int) -> Table:
    """Return a Rich table of rollouts; texts are shown as they are, markup included.

    Args:
        rows: From :func:`rollout_rows`.
        title: Of the table.
        max_text_length: Characters after which a text is cut off.
    """
    table = Table(title=title, show_lines=True)
    for name in ("prompt", "completion"):
        table.add_column(name, overflow="fold")
    for name in ("reward", "advantage", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    has_extra = any(EXTRA in row for row in rows)
    if has_extra:
        table.add_column(EXTRA, overflow="fold")
    for row in rows:
        texts = [Text(_cut(row[name], max_text_length)) for name in ("prompt", "completion")]
        numbers = ["-" if row[name] is None else f"{row[name]:.3f}" for name in ("reward", "advantage")]
        extra = [Text(_cut(extra_text(row), max_text_length))] if has_extra else []
        table.add_row(*texts, *numbers, str(row["num_response_tokens"]), *extra)
    return table


def rollout_histograms(table: RolloutTable, num_bins: int) -> dict[str, dict[str, list[float]]]:
    """Return histograms of the response lengths (tokens) and of the rewards of all ranks' rollouts.

    Args:
        table: Known to every rank.
        num_bins: Bins of equal width between the least and the greatest value.

    Returns:
        ``"length"`` and ``"reward"``, each with ``"edges"`` (num_bins + 1) and ``"counts"`` (num_bins). A value on an inner edge counts
        in the bin above it. Values that are all the same make one bin without width; no values make none.
    """
    histograms: dict[str, dict[str, list[float]]] = {}
    for name, values in _columns(table).items():
        if not values:
            histograms[name] = {"edges": [], "counts": []}
        elif min(values) == max(values):
            histograms[name] = {"edges": [values[0], values[0]], "counts": [len(values)]}
        else:
            counts, edges = np.histogram(values, bins=num_bins)
            histograms[name] = {"edges": [float(edge) for edge in edges], "counts": [int(count) for count in counts]}
    return histograms


def rollout_quantiles(table: RolloutTable) -> dict[str, float]:
    """Return quantiles of the response lengths (tokens) and of the rewards of all ranks' rollouts, for a logger.

    Args:
        table: Known to every rank.
    """
    return {
        f"rollouts/{name}_{label}": float(np.quantile(values, level))
        for name, values in _columns(table).items()
        for label, level in QUANTILES.items()
        if values
    }


def _columns(table: RolloutTable) -> dict[str, list[float]]:
    rewards = [reward for reward in table.rewards.tolist() if not math.isnan(reward)]
    return {"length": [float(length) for length in table.num_response_tokens], "reward": rewards}


def _describe(histogram: dict[str, list[float]], *, whole: bool) -> str:
    """Return the bins that hold values; as ranges of whole numbers, both ends included, where the values are ones."""
    edges, counts = histogram["edges"], histogram["counts"]
    bounds = list(itertools.pairwise(edges))
    if whole:  # a value on an inner edge is in the bin above it
        bounds = [(math.ceil(low), math.floor(high) if high == edges[-1] else math.ceil(high) - 1) for low, high in bounds]
    bins = [f"{low:.4g}{f'..{high:.4g}' * (low < high)}: {count}" for (low, high), count in zip(bounds, counts) if count]
    return ", ".join(bins) or "none"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "..."
