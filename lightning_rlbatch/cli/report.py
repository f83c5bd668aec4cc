"""``rlbatch report``: one self-contained HTML page about a run."""

import argparse
import base64
import dataclasses
import datetime
import functools
import html
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lightning_rlbatch.cli.config_file import ConfigFileError, read_config
from lightning_rlbatch.cli.numbers import number
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
    parser.add_argument(
        "run",
        nargs="+",
        help="folder of the run's CSVLogger, or its metrics.csv; several are one run that was resumed, oldest first",
    )
    parser.add_argument("--output", "-o", help="page to write (default: report.html beside the metrics)")
    parser.add_argument("--title", help="of the page (default: names of the folder)")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        run = functools.reduce(RunMetrics.resumed_by, map(RunMetrics.find, options.run))
    except ValueError as error:
        console.print(Text(str(error), style="bold red"))
        return 1
    path = Path(options.output) if options.output else run.path.with_name("report.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_html(run, options.title or run_title(run.path)), encoding="utf-8")
    console.print(Text(f"Wrote {path}"))
    return 0


def report_html(run: RunMetrics, title: str) -> str:
    """Return the page.

    Args:
        run: What was logged.
        title: Of the page.
    """
    config = _configuration(run.path.parent)
    cards = "\n".join(chart.to_html() for chart in charts(run, _max_grad_norm(config)))
    parts = {
        "title": html.escape(title),
        "about": html.escape(_about(run.path, config)),
        "tiles": _tiles(run),
        "doctor": _doctor(run),
        "cards": cards,
        "plan": waiting_table(run.path.parent) + _plan(run.path.parent),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], PAGE)


def run_title(path: Path) -> str:
    """Return the names of a run's folder that a reader knows it by, without those that loggers give.

    Args:
        path: Its ``metrics.csv``.

    Example:
        >>> run_title(Path("/home/me/outputs/hanoi/grpo/version_1/metrics.csv")), run_title(Path("/me/runs/first/metrics.csv"))
        ('hanoi / grpo, version 1', 'runs / first')
    """
    folder = path.absolute().parent
    number = re.fullmatch(r"version_(\d+)", folder.name)
    named = [name for name in folder.parts[1:] if not re.fullmatch(r"version_\d+|lightning_logs", name)]
    return " / ".join(named[-2:]) + (f", version {number[1]}" if number else "")


def _about(path: Path, config: dict[str, Any]) -> str:
    """Return what was trained on what, where the configuration says so, and when."""
    words = []
    for section, options in (("model", ("policy",)), ("data", ("train_prompts", "train_dataset", "dirpath"))):
        made = config.get(section)
        if isinstance(made, dict) and isinstance(made.get("class_path"), str):
            given = made.get("init_args") or {}
            named = next((given[option] for option in options if isinstance(given.get(option), str)), None)
            words.append(made["class_path"].rpartition(".")[2] + ("" if named is None else f" of {named}"))
    when = datetime.datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    return " | ".join([*words, f"last logged {when}", str(path.parent)])


def _configuration(folder: Path) -> dict[str, Any]:
    """Return the run's configuration, as LightningCLI saved it; empty if there is none."""
    try:
        return read_config(["--config", str(folder / "config.yaml")])
    except ConfigFileError:
        return {}


def _max_grad_norm(config: dict[str, Any]) -> float | None:
    """Return the limit that gradients are clipped at."""
    try:
        limit = config["model"]["init_args"].get("max_grad_norm")
    except (KeyError, TypeError, AttributeError):
        return None
    return float(limit) if isinstance(limit, int | float) else None


def _tiles(run: RunMetrics) -> str:
    found = [("steps", max((row["step"] for row in run.rows if "step" in row), default=-1) + 1)]
    epochs = {row["epoch"] for row in run.rows if "epoch" in row}
    found.append(("iterations", len(epochs)))
    last = [
        ("reward", "reward/mean"),
        *held_out(run, of_several=False),
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
    history = load_pure("callbacks.doctor_history").History()
    for metrics in iterations:
        history.add(metrics)
        for diagnosis in rules.diagnose(history, rules.Thresholds()):
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
