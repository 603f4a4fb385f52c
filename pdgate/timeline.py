"""The course of a simulation as a picture: attainment, split and queue over time. SVG or PNG, no library."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Protocol

import msgspec

from pdgate.raster import Raster
from scheduler.simulator.report import Sample

WIDTH, PANEL, LEFT, RIGHT, GAP = 960, 170, 64, 24, 52
_TOP = 24
_INK, _GRID = "#333333", "#dddddd"
_COLOURS = ("#2563eb", "#d97706", "#059669")
_MAX_POINTS = 480


class PlotError(ValueError):
    """The picture cannot be made; the message says why."""


class Canvas(Protocol):
    """What a picture is drawn on; x to the right, y down, pixels."""

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, width: int) -> None:
        """Draw a polyline."""

    def text(self, x: float, y: float, text: str, colour: str, *, anchor: str) -> None:
        """Write with the baseline at y; `anchor` is start, middle or end."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One series of a panel."""

    name: str
    values: list[float]


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One diagram of the picture."""

    title: str
    top: float  # of the y axis
    curves: Sequence[Curve]


def write_plot(file: Path, samples: Sequence[Sample]) -> None:
    """Write the picture. Raises PlotError or OSError."""
    if len(samples) < 2:
        raise PlotError("--plot: the run is too short for a picture (under 10 s)")
    write_panels(file, *_panels(samples))


def write_panels(file: Path, times_s: Sequence[float], panels: Sequence[Panel]) -> None:
    """Write diagrams below each other over one time axis. Raises PlotError or OSError."""
    if file.suffix not in (".svg", ".png"):
        raise PlotError(f"--plot: {file} must end in .svg or .png")
    height = _TOP + len(panels) * (PANEL + GAP)
    drawing = SvgCanvas(WIDTH, height) if file.suffix == ".svg" else Raster(WIDTH, height)
    for index, panel in enumerate(panels):
        _panel(drawing, _TOP + index * (PANEL + GAP), panel, times_s)
    if isinstance(drawing, SvgCanvas):
        file.write_text(drawing.text_of(), encoding="utf-8")
    else:
        file.write_bytes(drawing.png())


def _panels(samples: Sequence[Sample]) -> tuple[list[float], list[Panel]]:
    """The times and the diagrams of a simulation."""
    every = -(-len(samples) // _MAX_POINTS)
    parts = [samples[first : first + every] for first in range(0, len(samples), every)]
    times_s = [part[-1].at_s for part in parts]
    attainment, last = [], 100.0
    for part in parts:
        ended = sum(sample.ended for sample in part)
        last = 100.0 * sum(sample.met for sample in part) / ended if ended else last
        attainment.append(last)
    splits = [part[-1].split for part in parts]
    return times_s, [
        Panel(title="targets met, %", top=100.0, curves=[Curve(name="met", values=attainment)]),
        Panel(
            title="ready workers",
            top=_nice(max(split.total for split in splits)),
            curves=[
                Curve(name="prefill", values=[float(split.prefill) for split in splits]),
                Curve(name="decode", values=[float(split.decode) for split in splits]),
                Curve(name="unified", values=[float(split.unified) for split in splits]),
            ],
        ),
        Panel(
            title="requests waiting",
            top=_nice(max(sample.num_waiting for sample in samples)),
            curves=[Curve(name="waiting", values=[float(max(s.num_waiting for s in part)) for part in parts])],
        ),
    ]


def _panel(canvas: Canvas, y: int, panel: Panel, times_s: Sequence[float]) -> None:
    right = WIDTH - RIGHT
    first_s, last_s = times_s[0], max(times_s[-1], times_s[0] + 1.0)

    def place(at_s: float, value: float) -> tuple[float, float]:
        across = (at_s - first_s) / (last_s - first_s)
        return LEFT + across * (right - LEFT), y + PANEL * (1 - min(value, panel.top) / panel.top)

    for part in range(5):
        value = panel.top * part / 4
        level = place(first_s, value)[1]
        canvas.line([(LEFT, level), (right, level)], _GRID, width=1)
        canvas.text(LEFT - 8, level + 4, f"{value:.4g}", _INK, anchor="end")
        at_s = first_s + (last_s - first_s) * part / 4
        canvas.text(place(at_s, 0)[0], y + PANEL + 16, f"{at_s:.0f} s", _INK, anchor="middle")
    canvas.text(LEFT, y - 8, panel.title, _INK, anchor="start")
    for index, curve in enumerate(panel.curves):
        colour = _COLOURS[index]
        if len(panel.curves) > 1:
            canvas.text(right - 90 * (len(panel.curves) - 1 - index), y - 8, curve.name, colour, anchor="end")
        points: list[tuple[float, float]] = []
        for at_s, value in zip(times_s, curve.values, strict=True):
            point = place(at_s, value)
            if points and points[-1][1] != point[1]:
                points.append((point[0], points[-1][1]))  # a step, not a slope
            points.append(point)
        canvas.line(points, colour, width=2)


def _nice(highest: int) -> float:
    """Return a top of the axis whose quarters are whole numbers."""
    return float(max(4, -(-highest // 4) * 4))


class SvgCanvas:
    """Collects SVG elements."""

    def __init__(self, width: int, height: int) -> None:
        size = f'width="{width}" height="{height}"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} font-family="sans-serif">',
            f'<rect {size} fill="#ffffff"/>',
        ]

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, width: int) -> None:
        """Draw a polyline."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def text(self, x: float, y: float, text: str, colour: str, *, anchor: str) -> None:
        """Write a line."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def text_of(self) -> str:
        """Return the whole file."""
        return "\n".join([*self._parts, "</svg>", ""])
