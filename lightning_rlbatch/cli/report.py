"""``rlbatch report``: one self-contained HTML page about a run."""

import argparse
import base64
import dataclasses
import html
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lightning_rlbatch.cli.charts import number
from lightning_rlbatch.cli.config_file import ConfigFileError, read_config
from lightning_rlbatch.cli.report_page import PAGE
from lightning_rlbatch.cli.report_plots import charts, held_out
from lightning_rlbatch.cli.report_waiting import waiting_table
from lightning_rlbatch.cli.run_config import load_pure
from lightning_rlbatch.cli.run_metrics import RunMetrics


def main(arguments: list[str]) -> int:
    """Run the subcommand.

    Args:
        arguments: After ``report``.

    Returns:
        0, or 1 if the run has no metrics.
    """
    parser = argparse.ArgumentParser(prog="rlbatch report", description="Write one HTML page with the plots of a run.")
    parser.add_argument("run", help="folder of the run's CSVLogger, or its metrics.csv")
    parser.add_argument("--output", "-o", help="page to write (default: report.html beside the metrics)")
    parser.add_argument("--title", help="of the page (default: the folder)")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        run = RunMetrics.find(options.run)
    except ValueError as error:
        console.print(Text(str(error), style="bold red"))
        return 1
    path = Path(options.output) if options.output else run.path.with_name("report.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_html(run, options.title or run.path.parent.name), encoding="utf-8")
    console.print(Text(f"Wrote {path}"))
    return 0


def report_html(run: RunMetrics, title: str) -> str:
    """Return the page.

    Args:
        run: What was logged.
        title: Of the page.
    """
    cards = "\n".join(chart.to_html() for chart in charts(run, _max_grad_norm(run.path.parent)))
    parts = {
        "title": html.escape(title),
        "tiles": _tiles(run),
        "doctor": _doctor(run),
        "cards": cards,
        "plan": waiting_table(run.path.parent) + _plan(run.path.parent),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], PAGE)


def _max_grad_norm(folder: Path) -> float | None:
    """Return the limit of the run's configuration, as LightningCLI saved it."""
    file = folder / "config.yaml"
    try:
        config: Any = read_config(["--config", str(file)])
        limit = config["model"]["init_args"].get("max_grad_norm")
    except (ConfigFileError, KeyError, TypeError, AttributeError):
        return None
    return float(limit) if isinstance(limit, int | float) else None


def _tiles(run: RunMetrics) -> str:
    found = [("steps", max((row["step"] for row in run.rows if "step" in row), default=-1) + 1)]
    epochs = {row["epoch"] for row in run.rows if "epoch" in row}
    found.append(("iterations", len(epochs)))
    last = [
        ("reward", "reward/mean"),
        *held_out(run),
        ("entropy", "train/entropy"),
        ("response tokens", "length/mean"),
        ("efficiency of plans", "balance/plan/efficiency"),
        ("tokens / s", "throughput/tokens_per_second"),
    ]
    tiles = [f'<div class="tile"><b>{number(value)}</b><span>{html.escape(label)}</span></div>' for label, value in found]
    for label, name in last:
        points = run.points(name)
        if points:
            began = f"<small>began at {number(points[0][1])}</small>" if len(points) > 1 else ""
            tiles.append(f'<div class="tile"><b>{number(points[-1][1])}</b><span>{html.escape(label)}</span>{began}</div>')
    return "".join(tiles)


def _doctor(run: RunMetrics) -> str:
    """Return what the rules of TrainingDoctor say about the run, each with the iterations at which it said so."""
    rules = load_pure("callbacks.doctor_rules")
    iterations = run.iterations()
    seen: dict[str, list[Any]] = {}
    for count in range(1, len(iterations) + 1):
        for diagnosis in rules.diagnose(rules.History(iterations[:count]), rules.Thresholds()):
            epoch = iterations[diagnosis.iteration].get("epoch", diagnosis.iteration)  # a resumed run's log begins in the middle
            diagnosis = dataclasses.replace(diagnosis, iteration=int(epoch))
            seen.setdefault(diagnosis.name, []).append(diagnosis)
    if not seen:
        return '<p class="good">The doctor found nothing.</p>'
    entries = []
    for name, found in seen.items():
        first, last = found[0], found[-1]
        when = f"iteration {first.iteration}" + (f", last at {last.iteration}" if len(found) > 1 else "")
        entries.append(f"<li><b>{name.replace('_', ' ')}</b> ({when}): {html.escape(first.seen)} <i>{html.escape(first.advice)}</i></li>")
    return f"<ul>{''.join(entries)}</ul>"


def _plan(folder: Path) -> str:
    """Return the newest picture of BalanceMonitor below the run's folder."""
    pictures = sorted(folder.glob("**/step_*.png"), key=lambda path: path.name)
    if not pictures:
        return ""
    data = base64.b64encode(pictures[-1].read_bytes()).decode()
    caption = f"Plan of a mini-batch ({html.escape(pictures[-1].stem.replace('_', ' '))})"
    return f'<figure><figcaption>{caption}</figcaption><img alt="{caption}" src="data:image/png;base64,{data}"></figure>'
