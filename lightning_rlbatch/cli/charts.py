"""Line charts and stacked bars as SVG text, without a plotting library."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_rlbatch.cli.numbers import short

WIDTH, HEIGHT = 460, 220
_LEFT, _TOP, _BOTTOM = 52, 12, 26
MAX_POINTS = 400
SMOOTHING = 0.2  # weight of the newest value in the running mean of a noisy curve


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        label: In the legend.
        points: (x, y), x ascending.
        colour: Number of the palette's colour.
        right: True draws it against the right axis, from 0 to 1.
        smooth: True draws the values pale and their running mean on top.
        dots: True marks each value.
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    right: bool = False
    smooth: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """One plot.

    Attributes:
        title: Above it.
        series: Curves; those without points are left out.
        unit: Of the left axis.
        missing: What to do to see it; shown instead of an empty plot.
        lines: (label, y) of horizontal lines.
        stacked: True draws the curves as bars on top of one another.
        note: Below the title.
        from_zero: False lets the left axis begin above 0.
        x_name: What the horizontal axis counts.
    """

    title: str
    series: Sequence[Series]
    unit: str = ""
    missing: str = ""
    lines: Sequence[tuple[str, float]] = field(default_factory=tuple)
    stacked: bool = False
    note: str = ""
    from_zero: bool = True
    x_name: str = "step"

    def to_html(self) -> str:
        """Return a card with the plot, or with the way to get it."""
        shown = [series for series in self.series if series.points]
        head = f"<h3>{html.escape(self.title)}</h3>" + (f'<p class="note">{html.escape(self.note)}</p>' if self.note else "")
        if not shown:
            return f'<section class="card missing">{head}<p class="hint">{html.escape(self.missing)}</p></section>'
        labels = [(series.colour, html.escape(series.label) + (" (right)" if series.right else "")) for series in shown]
        legend = "".join(f'<span><i class="c{colour}"></i>{label}</span>' for colour, label in labels)
        shown = [_thinned(series) for series in shown]
        data = [{"label": series.label, "points": [[x, _short(y)] for x, y in series.points]} for series in shown]
        plot = _Plot(self, shown).svg()
        details = html.escape(json.dumps(data, separators=(",", ":")), quote=True)
        body = f'<div class="legend">{legend}</div><div class="plot" data-x-name="{self.x_name}" data-series="{details}">{plot}</div>'
        return f'<section class="card">{head}{body}</section>'


def _thinned(series: Series) -> Series:
    """Return the curve with at most ``MAX_POINTS`` points, each the mean of as many neighbours."""
    size = -(-len(series.points) // MAX_POINTS)
    if size == 1:
        return series
    groups = [series.points[start : start + size] for start in range(0, len(series.points), size)]
    points = [(group[-1][0], math.fsum(y for _, y in group) / len(group)) for group in groups]
    return Series(series.label, points, series.colour, series.right, series.smooth, series.dots)


class _Plot:
    def __init__(self, chart: Chart, series: Sequence[Series]) -> None:
        self.chart = chart
        self.series = series
        self.right = WIDTH - (44 if any(one.right for one in series) else 12)
        xs = [x for one in series for x, _ in one.points]
        self.x_low, self.x_high = min(xs), max(xs) if max(xs) > min(xs) or chart.stacked else min(xs) + 1
        places = sorted(set(xs))
        # A bar is as wide as the smallest distance, and the first and last are seen whole.
        self.bar = min((after - before for before, after in pairwise(places)), default=1.0)
        if chart.stacked:
            self.x_low, self.x_high = self.x_low - self.bar / 2, self.x_high + self.bar / 2
        left = [one for one in series if not one.right]
        values = [y for one in left for _, y in one.points] + ([y for _, y in chart.lines] if left else [])
        if chart.stacked:
            values = [math.fsum(column) for column in zip(*([y for _, y in one.points] for one in left))]
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if chart.from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if not chart.from_zero and high == low:
            low, high = low - 0.01 * abs(low), high + 0.01 * abs(high)
        spread = (high - low) or abs(high) or 1.0
        high = high if high > low else low + spread
        self.y_low = low if chart.from_zero and low == 0 else low - 0.06 * spread
        self.y_high = high + 0.06 * spread

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - _LEFT)

    def y(self, value: float, right: bool = False) -> float:
        low, high = (0.0, 1.0) if right else (self.y_low, self.y_high)
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    def svg(self) -> str:
        marks = self._bars() if self.chart.stacked else "".join(self._curve(series) for series in self.series)
        lines = "".join(
            f'<line class="limit" x1="{_LEFT}" x2="{self.right}" y1="{self.y(y):.1f}" y2="{self.y(y):.1f}"/>'
            f'<text class="limit" x="{self.right - 3}" y="{self.y(y) - 3:.1f}" text-anchor="end">{html.escape(label)}</text>'
            for label, y in self.chart.lines
        )
        box = f'viewBox="0 0 {WIDTH} {HEIGHT}" data-x="{self.x_low},{self.x_high},{_LEFT},{self.right}"'
        return f'<svg {box} role="img" aria-label="{html.escape(self.chart.title, quote=True)}">{self._axes()}{marks}{lines}</svg>'

    def _axes(self) -> str:
        parts = []
        for value in ticks(self.y_low, self.y_high, 4):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{short(value)}</text>')
        if any(series.right for series in self.series):
            for value in (0.0, 0.5, 1.0):
                parts.append(f'<text x="{self.right + 6}" y="{self.y(value, True) + 3.5:.1f}">{100 * value:.0f}%</text>')
        for value in ticks(self.x_low, self.x_high, 5):
            if not self.chart.stacked or value == int(value):
                parts.append(f'<text x="{self.x(value):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{short(value)}</text>')
        parts.append(f'<text class="unit" x="{self.right}" y="{HEIGHT - 1}" text-anchor="end">{self.chart.x_name}</text>')
        if self.chart.unit:
            parts.append(f'<text class="unit" x="{_LEFT}" y="9">{html.escape(self.chart.unit)}</text>')
        return "".join(parts)

    def _curve(self, series: Series) -> str:
        points = series.points
        marks = ""
        if series.smooth and len(points) > 8:
            marks = f'<polyline class="s{series.colour} pale" points="{self._path(points, series.right)}"/>'
            points = running_mean(points)
        marks += f'<polyline class="s{series.colour}" points="{self._path(points, series.right)}"/>'
        if series.dots or len(points) == 1:
            marks += "".join(
                f'<circle class="d{series.colour}" cx="{self.x(x):.1f}" cy="{self.y(y, series.right):.1f}" r="3"/>' for x, y in points
            )
        return marks

    def _path(self, points: Sequence[tuple[float, float]], right: bool) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y, right):.1f}" for x, y in points)

    def _bars(self) -> str:
        lower = [0.0] * len(self.series[0].points)
        marks = []
        for series in self.series:
            upper = [base + y for base, (_, y) in zip(lower, series.points)]
            edges = [(x - self.bar / 2, x + self.bar / 2) for x, _ in series.points]
            above, below = ([(edge, y) for pair, y in zip(edges, heights) for edge in pair] for heights in (upper, lower))
            marks.append(f'<polygon class="a{series.colour}" points="{self._path([*above, *reversed(below)], False)}"/>')
            lower = upper
        return "".join(marks)


def running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return an exponential running mean of a curve.

    Args:
        points: (x, y).
    """
    mean = points[0][1]
    result = []
    for x, y in points:
        mean += SMOOTHING * (y - mean)
        result.append((x, mean))
    return result


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about so many round numbers between two values.

    Args:
        low: Smallest value.
        high: Largest value, above ``low``.
        count: Wanted number.

    Example:
        >>> ticks(0, 10, 4)
        [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    raw = (high - low) / count
    scale = 10 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{index * step:.10g}") + 0.0 for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> float:
    return float(f"{value:.5g}")
