"""Plots of the soak test: sparklines for the terminal, and small charts in one SVG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

_BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, MARGIN, COLUMNS = 420, 150, 44, 2


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


def write_svg(
    path: Path,
    title: str,
    series: Mapping[str, tuple[str, Sequence[tuple[float, float]]]],
    warm_up: float,
) -> None:
    """Write one chart per series, with the warm-up shaded.

    `series`: maps a name to its unit and its points (seconds, value).
    """
    rows = (len(series) + COLUMNS - 1) // COLUMNS
    width, height = COLUMNS * (WIDTH + MARGIN) + MARGIN, rows * (HEIGHT + 2 * MARGIN) + MARGIN
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="sans-serif">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, (name, (unit, points)) in enumerate(series.items()):
        left = MARGIN + number % COLUMNS * (WIDTH + MARGIN)
        top = 2 * MARGIN + number // COLUMNS * (HEIGHT + 2 * MARGIN)
        parts += _chart(left, top, f"{name}, {unit}", points, warm_up)
    parts.append("</svg>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts), encoding="utf-8")


def _chart(
    left: int, top: int, title: str, points: Sequence[tuple[float, float]], warm_up: float
) -> list[str]:
    end = max((at for at, _ in points), default=1.0) or 1.0
    most = max((value for _, value in points), default=1.0) or 1.0
    line = " ".join(
        f"{left + at / end * WIDTH:.1f},{top + HEIGHT - value / most * HEIGHT:.1f}"
        for at, value in points
    )
    bottom = top + HEIGHT
    small = 'font-size="11" fill="#555"'
    return [
        (
            f'<rect x="{left}" y="{top}" width="{min(1.0, warm_up / end) * WIDTH:.1f}" '
            f'height="{HEIGHT}" fill="#eee"/>'
        ),
        f'<path d="M{left},{top}V{bottom}H{left + WIDTH}" fill="none" stroke="#999"/>',
        f'<polyline points="{line}" fill="none" stroke="#1565c0" stroke-width="1.5"/>',
        f'<text x="{left}" y="{top - 8}" font-size="13">{escape(title)}</text>',
        f'<text x="{left + WIDTH}" y="{top - 8}" {small} text-anchor="end">max {most:.4g}</text>',
        f'<text x="{left}" y="{bottom + 16}" {small}>0</text>',
        (
            f'<text x="{left + WIDTH}" y="{bottom + 16}" {small} text-anchor="end">'
            f"{end / 60:.1f} min</text>"
        ),
    ]
