"""Line plots as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP = 400, 260, 56, 34  # of a panel, and its margins, in pixels
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")


@dataclass(frozen=True)
class Line:
    """Points of one curve; a dashed one is a level to compare with."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def draw(title: str, *panels: tuple[str, str, Sequence[Line]]) -> str:
    """Panels side by side, each (label of x, label of y, lines); both axes begin at 0."""
    parts = [_text(WIDTH * len(panels) / 2, 16, title, "middle", 13)]
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate({i * WIDTH},0)">{_panel(*panel)}</g>')
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _panel(x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    right, bottom = WIDTH - 90, HEIGHT - 40
    most_x = _round_up(max(max(line.x) for line in lines))
    most_y = _round_up(max(max(line.y) for line in lines))

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
    """Return the next number whose quarter is round; powers of two stay as they are."""
    if value == 2 ** round(math.log2(value)):
        return value
    unit = 10 ** math.floor(math.log10(value))
    return next(n * unit for n in (1, 2, 4, 6, 8, 10, 20) if n * unit >= value)
