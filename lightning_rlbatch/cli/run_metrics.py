"""Read what a run logged to CSVLogger."""

import csv
import math
from collections.abc import Iterable
from pathlib import Path


class RunMetrics:
    """Columns of a ``metrics.csv``.

    Args:
        path: The file.
        rows: Number -> value per row; empty cells and values that are not finite are left out.
    """

    def __init__(self, path: Path, rows: list[dict[str, float]]) -> None:
        self.path = path
        self.rows = rows

    @classmethod
    def find(cls, path: str) -> "RunMetrics":
        """Read the metrics of a run.

        Args:
            path: A CSV file, or a folder that holds ``metrics.csv``, itself or in its newest ``version_N``.

        Raises:
            ValueError: There is none, or it has no rows.
        """
        place = Path(path)
        candidates = [place] if place.is_file() else [place / "metrics.csv", *_versions(place)]
        found = next((file for file in candidates if file.is_file()), None)
        if found is None:
            raise ValueError(
                f"There is no metrics.csv in {place.absolute()}. Log with lightning.pytorch.loggers.CSVLogger and pass its folder"
                " (save_dir/name/version)."
            )
        with found.open(newline="", encoding="utf-8") as stream:
            rows = [{name: number for name, text in row.items() if (number := _number(text)) is not None} for row in csv.DictReader(stream)]
        if not rows:
            raise ValueError(f"{found} has no rows: the run logged nothing.")
        return cls(found, rows)

    def resumed_by(self, later: "RunMetrics") -> "RunMetrics":
        """Return the metrics of a run and of its resumption as those of one run; what the resumption did again counts once.

        Args:
            later: Of the resumed run, in whose folder everything else is looked for.

        Raises:
            ValueError: The first run has nothing that is older: they are two runs, or in the wrong order.
        """
        begin = min((row["step"] for row in later.rows if "step" in row), default=math.inf)
        kept = [row for row in self.rows if row.get("step", math.inf) < begin]
        if not kept:
            raise ValueError(
                f"{self.path} has no step before {begin:g}, where {later.path} begins: it was not resumed there. Pass the"
                " folders of one run, oldest first, or one folder."
            )
        return RunMetrics(later.path, kept + later.rows)

    @property
    def names(self) -> list[str]:
        """Columns with at least one value."""
        return sorted({name for row in self.rows for name in row})

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) of a column, in the order of the steps."""
        found = {row.get("step", float(index)): row[name] for index, row in enumerate(self.rows) if name in row}
        return sorted(found.items())

    def iterations(self) -> list[dict[str, float]]:
        """Return the mean of every column per epoch (an RL iteration), validation left out, and ``first_ratio``.

        Rows without an epoch, such as those of RolloutLogger, belong to that of their step.
        """
        epochs = {row["step"]: row["epoch"] for row in self.rows if "epoch" in row and "step" in row}
        groups: dict[float, list[dict[str, float]]] = {}
        epoch = 0.0
        for row in self.rows:
            epoch = row.get("epoch", epochs.get(row.get("step", -1.0), epoch))
            if not any(name.startswith("val/") for name in row):
                groups.setdefault(epoch, []).append(row)
        return [_mean(groups[epoch]) for epoch in sorted(groups)]

    def first_of_iterations(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) of a column at the first step of every epoch."""
        seen: set[float] = set()
        first = []
        for row in self.rows:
            if name in row and row.get("epoch", 0.0) not in seen:
                seen.add(row.get("epoch", 0.0))
                first.append((row.get("step", 0.0), row[name]))
        return first


def _versions(folder: Path) -> list[Path]:
    def version(path: Path) -> int:
        number = path.name.removeprefix("version_")
        return int(number) if number.isdigit() else -1

    found: Iterable[Path] = folder.glob("version_*") if folder.is_dir() else ()
    return [path / "metrics.csv" for path in sorted(found, key=version, reverse=True)]


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    values = {name: [row[name] for row in rows if name in row] for name in names}
    means = {name: math.fsum(found) / len(found) for name, found in values.items()}
    if "train/ratio" in values:
        means["first_ratio"] = values["train/ratio"][0]
    return means
