"""Plots of the benchmarks: sparklines for the terminal, and small line charts in one SVG file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

_BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, MARGIN, COLUMNS = 420, 190, 56, 2
COLOURS = ("#1565c0", "#c62828", "#2e7d32", "#6a1b9a", "#ef6c00")
SMALL = 'font-size="11" fill="#555"'

Points = Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """A chart of one or more lines.

    `x`: the label of the horizontal axis. `lines`: the points (x, y) of each line by its name.
    `is_log`: both axes are logarithmic. `shaded`: the part of the horizontal axis, from 0, that
    does not count.
    """

    title: str
    x: str
    lines: Mapping[str, Points]
    is_log: bool = False
    shaded: float = 0.0


class Axis(NamedTuple):
    """Maps the values of an axis to 0 to 1."""

    first: float
    last: float
    is_log: bool

    def at(self, value: float) -> float:
        if not self.is_log:
            return (value - self.first) / (self.last - self.first)
        return math.log(value / self.first) / math.log(self.last / self.first)

    def ticks(self) -> list[float]:
        if not self.is_log:
            return [self.first, self.last]
        powers = range(round(math.log10(self.first)), round(math.log10(self.last)) + 1)
        return [10.0**power for power in powers]


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Draw the values from 0 to their maximum. A character shows the mean of its values."""
    if not values:
        return ""
    width = min(width, len(values))
    bins = [
        values[len(values) * n // width : max(len(values) * (n + 1) // width, 1)]
        for n in range(width)
    ]
    means = [sum(each) / len(each) for each in bins if each]
    top = max(means) or 1.0
    return "".join(_BLOCKS[min(7, int(mean / top * 8))] for mean in means)


def write_svg(path: Path, title: str, charts: Sequence[Chart]) -> None:
    """Write the charts in two columns, under one title."""
    rows = (len(charts) + COLUMNS - 1) // COLUMNS
    width = COLUMNS * (WIDTH + MARGIN) + MARGIN
    height = rows * (HEIGHT + 2 * MARGIN) + MARGIN
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, chart in enumerate(charts):
        left = MARGIN + number % COLUMNS * (WIDTH + MARGIN)
        top = 2 * MARGIN + number // COLUMNS * (HEIGHT + 2 * MARGIN)
        parts += _chart(left, top, chart)
    parts.append("</svg>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def shown(tick: float) -> str:
    """Format the number at a tick without an exponent."""
    return f"{tick:,.0f}" if tick >= 100 else f"{tick:.3g}"


def _axis(values: Sequence[float], *, is_log: bool) -> Axis:
    most = max(values, default=1.0) or 1.0
    if not is_log:
        return Axis(0.0, most, is_log)
    least = min(values, default=1.0)
    assert least > 0, "a logarithmic axis has no zero"
    first, last = 10.0 ** math.floor(math.log10(least)), 10.0 ** math.ceil(math.log10(most))
    return Axis(first, max(last, first * 10), is_log)


def _chart(left: int, top: int, chart: Chart) -> list[str]:
    points = [point for line in chart.lines.values() for point in line]
    x = _axis([point[0] for point in points], is_log=chart.is_log)
    y = _axis([point[1] for point in points], is_log=chart.is_log)
    bottom = top + HEIGHT
    parts = [
        f'<text x="{left}" y="{top - 8}" font-size="13">{escape(chart.title)}</text>',
        (
            f'<rect x="{left}" y="{top}" height="{HEIGHT}" fill="#eee" '
            f'width="{min(1.0, chart.shaded / x.last) * WIDTH:.1f}"/>'
        ),
        f'<path d="M{left},{top}V{bottom}H{left + WIDTH}" fill="none" stroke="#999"/>',
        f'<text x="{left + WIDTH}" y="{bottom + 30}" {SMALL} text-anchor="end">'
        f"{escape(chart.x)}</text>",
    ]
    for tick in x.ticks():
        at = left + x.at(tick) * WIDTH
        parts.append(
            f'<text x="{at:.1f}" y="{bottom + 16}" {SMALL} text-anchor="middle">'
            f"{shown(tick)}</text>"
        )
    for tick in y.ticks():
        at = bottom - y.at(tick) * HEIGHT
        parts.append(
            f'<text x="{left - 6}" y="{at + 4:.1f}" {SMALL} text-anchor="end">{shown(tick)}</text>'
        )
        parts.append(f'<path d="M{left},{at:.1f}H{left + WIDTH}" stroke="#eee"/>')
    for number, (name, line) in enumerate(chart.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        drawn = [(left + x.at(a) * WIDTH, bottom - y.at(b) * HEIGHT) for a, b in line]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in drawn)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(line) <= 20:
            parts += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in drawn
            ]
        if len(chart.lines) > 1:
            parts.append(
                f'<text x="{left + 10}" y="{top + 14 + 15 * number}" font-size="12" '
                f'fill="{colour}">{escape(name)}</text>'
            )
    return parts
