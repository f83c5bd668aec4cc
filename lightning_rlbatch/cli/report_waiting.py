"""Table of a run report: how long each rank waited in each micro-step of the last step that was measured."""

import csv
from pathlib import Path

MAX_RANKS, MAX_MICRO_STEPS = 64, 24


def waiting_table(folder: Path) -> str:
    """Return the table as HTML; empty if nothing was measured.

    Args:
        folder: Of the run, with ThroughputMonitor's ``waiting.csv``.
    """
    file = folder / "waiting.csv"
    if not file.is_file():
        return ""
    with file.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    if not rows:
        return ""
    last = rows[-1]["step"]
    cells = {(int(row["rank"]), int(row["micro_step"])): float(row["seconds"]) for row in rows if row["step"] == last}
    ranks, steps = (max(place[axis] for place in cells) + 1 for axis in (0, 1))
    shown_ranks, shown_steps = min(ranks, MAX_RANKS), min(steps, MAX_MICRO_STEPS)
    most = max(cells.values()) or 1.0
    head = "".join(f"<th>{step}</th>" for step in range(shown_steps))
    body = "".join(
        f"<tr><th>rank {rank}</th>"
        + "".join(_cell(cells.get((rank, step), 0.0), most) for step in range(shown_steps))
        + _cell(sum(cells.get((rank, step), 0.0) for step in range(steps)), 0.0)
        + "</tr>"
        for rank in range(shown_ranks)
    )
    some = (
        f" (the first {shown_ranks} of {ranks} ranks, {shown_steps} of {steps} micro-steps)"
        if (ranks, steps) != (shown_ranks, shown_steps)
        else ""
    )
    caption = f"Milliseconds that each rank waited for the others, by micro-step of optimizer step {last}{some}"
    table = f"<table><tr><th></th>{head}<th>sum</th></tr>{body}</table>"
    return f'<figure class="waiting"><figcaption>{caption}</figcaption><div class="scroll">{table}</div></figure>'


def _cell(seconds: float, most: float) -> str:
    share = 70 * seconds / most if most else 0.0
    shade = f' style="background: color-mix(in srgb, var(--c1) {share:.0f}%, transparent)"' if most else ' class="sum"'
    milliseconds = 1000 * seconds
    return f"<td{shade}>{milliseconds:.{0 if milliseconds >= 10 else 1}f}</td>"
