"""Plots as inline SVG: bars, lines and a shaded table. No script, no font, no outside file."""

import math
from collections.abc import Sequence
from html import escape

import msgspec

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 12, 40
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One curve."""

    name: str
    points: list[tuple[float, float]]


def bars(rows: Sequence[tuple[str, float, str]], *, unit: str) -> str:
    """Return horizontal bars: name, value, what is written beside the bar. Negative values go to the left."""
    low, high = min(0.0, *(v for _, v, _ in rows)), max(0.0, *(v for _, v, _ in rows))
    span = (high - low) or 1.0
    left, width = 230, WIDTH - 230 - 90
    height = 22 * len(rows) + 24
    zero = left + width * (-low / span)
    parts = [_open(height, f"bars in {unit}")]
    for index, (name, value, text) in enumerate(rows):
        y = 6 + 22 * index
        end = left + width * ((value - low) / span)
        x, size = min(zero, end), abs(end - zero)
        colour = COLOURS[0] if value >= 0 else COLOURS[1]
        parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{max(1.0, size):.1f}" height="15" fill="{colour}"/>')
        parts.append(f'<text x="{max(zero, end) + 6:.1f}" y="{y + 12}">{escape(text)}</text>')
    parts.append(f'<text x="{left}" y="{height - 4}" class="unit">{escape(unit)}</text></svg>')
    return "".join(parts)


def lines(curves: Sequence[Line], *, x: str, y: str, y_top: float | None = None) -> str:
    """Return curves over a logarithmic x axis (values above zero) and a y axis from zero."""
    xs = [math.log10(px) for c in curves for px, _ in c.points if px > 0]
    left, right = math.floor(min(xs)), max(math.ceil(max(xs)), math.floor(min(xs)) + 1)
    top = y_top or max(py for c in curves for _, py in c.points) or 1.0

    def across(px: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(px) - left) / (right - left)

    def down(py: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(py, top) / top)

    parts = [_open(HEIGHT, f"{y} over {x}")]
    for quarter in range(5):
        at = down(top * quarter / 4)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{top * quarter / 4:.3g}</text>')
    for power in range(left, right + 1):
        at = across(10.0**power)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="grid"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 24}" text-anchor="middle">{10.0**power:g}</text>')
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{across(px):.1f},{down(py):.1f}" for px, py in curve.points if px > 0)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{LEFT + 10 + 180 * index}" y="{HEIGHT - 6}" fill="{colour}">{escape(curve.name)}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end" class="unit">{escape(x)}</text></svg>')
    return "".join(parts)


def shade(value: float, *, threshold: float) -> str:
    """Return a background colour: green from the threshold up, amber between zero and it, red below zero."""
    if value >= threshold:
        return "#bbf7d0"
    return "#fef3c7" if value >= 0 else "#fecaca"


def _open(height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>{escape(title)}</title>'
    )
