"""Line plots as SVG text: enough for one figure in the docs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP = 380, 260, 56, 34  # of a panel, and its margins
COLOURS = ("#0072b2", "#999999", "#e69f00", "#009e73")


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def write_plot(path: Path, title: str, x_label: str, panels: Mapping[str, Sequence[Line]]) -> None:
    """Panels side by side, by the label of their y axis; both axes from 0."""
    parts = [_text(WIDTH * len(panels) / 2, 16, title, "middle", 13)]
    for i, (y_label, lines) in enumerate(panels.items()):
        parts.append(f'<g transform="translate({i * WIDTH},0)">{_panel(x_label, y_label, lines)}</g>')
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    partial = path.with_suffix(".part")
    partial.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n")
    partial.replace(path)


def _panel(x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    right, bottom = WIDTH - 70, HEIGHT - 40
    most_x, most_y = (_round_up(max(max(getattr(line, axis)) for line in lines)) for axis in "xy")

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * x / most_x, bottom - (bottom - TOP) * y / most_y

    out = [_text(LEFT, TOP - 6, y_label), _text((LEFT + right) / 2, HEIGHT - 8, x_label, "middle")]
    for tick in range(5):
        x, y = at(most_x * tick / 4, most_y * tick / 4)
        out.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#dddddd"/>')
        out.append(_text(LEFT - 5, y + 4, f"{most_y * tick / 4:g}", "end"))
        out.append(_text(x, bottom + 15, f"{most_x * tick / 4:g}", "middle"))
    ends: list[tuple[float, str, str]] = []
    for line, colour in zip(lines, COLOURS, strict=False):
        points = [at(x, y) for x, y in zip(line.x, line.y, strict=True)]
        dash = ' stroke-dasharray="4 3"' if line.dashed else ""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not line.dashed:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        ends.append((points[-1][1] + 4, line.name, colour))
    below = 0.0
    for y, name, colour in sorted(ends):  # labels that would overlap move down
        below = max(y, below + 12)
        out.append(_text(right + 6, below, name, colour=colour))
    return "".join(out)


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, colour: str = "#333333") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _round_up(value: float) -> float:
    """The next number whose quarter is round."""
    unit = 10 ** math.floor(math.log10(max(value, 1e-9)))
    return next(n * unit for n in (1, 2, 4, 6, 8, 10, 20) if n * unit >= value)
