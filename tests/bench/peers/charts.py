"""Charts as SVG: bars with their spread, and lines. They follow the reader's light or dark scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median

from tests.bench.peers.registry import PEERS
from tests.bench.peers.report import Column, Found

WIDTH = 760
LABEL = 150
RIGHT = 90
ROW = 22
COLOURS = ("#2f81f7", "#8957e5")
LINES = ("#2f81f7", "#d29922", "#3fb950", "#db61a2", "#8957e5", "#f0883e", "#768390", "#39c5cf")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: 14px }
.quiet { fill: #59636e } .axis { stroke: #d1d9e0 } .spread { stroke: #1f2328; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .quiet { fill: #9198a1 } .axis { stroke: #3d444d } .spread { stroke: #f0f6fc }
}
"""


def bars(title: str, figures: dict[str, Found], columns: Sequence[Column], *, least: bool = False) -> str:
    """Each peer's medians with lines from the least to the most of the rounds; the best in the first column on top."""
    values = {name: [column.values(figures, name) for column in columns] for name in PEERS}
    values = {name: found for name, found in values.items() if any(found)}
    names = sorted(values, key=lambda name: median(values[name][0] or [0]), reverse=not least)
    top = max(max(each, default=0) for found in values.values() for each in found) or 1
    scale = (WIDTH - LABEL - RIGHT) / top
    y = 36
    shapes = [_text(10, 20, title, "title"), *_legend([column.head for column in columns], COLOURS)]
    for name in names:
        height = ROW * len(columns)
        shapes.append(_text(LABEL - 8, y + height / 2 + 2, name, anchor="end", bold=name == "pgqueue"))
        for place, each in enumerate(values[name]):
            if each:
                shapes += _bar(y + place * ROW, each, scale, COLOURS[place], columns[place].digits)
        y += height + 8
    return _svg(y + 8, shapes)


def _bar(y: float, each: Sequence[float], scale: float, colour: str, digits: int) -> list[str]:
    middle, low, high = (max(0, value) * scale for value in (median(each), min(each), max(each)))
    line = y + (ROW - 4) / 2
    return [
        f'<rect x="{LABEL}" y="{y}" width="{middle:.1f}" height="{ROW - 4}" rx="2" fill="{colour}"/>',
        f'<line class="spread" x1="{LABEL + low:.1f}" x2="{LABEL + high:.1f}" y1="{line}" y2="{line}"/>',
        _text(LABEL + high + 6, y + 13, f"{median(each):,.{digits}f}", "quiet"),
    ]


def lines(title: str, series: Mapping[str, Sequence[float]], x_label: str) -> str:
    """One line a name, from the first to the last of its values."""
    height, left, top = 260, 60, 40
    most = max((max(values) for values in series.values()), default=1) or 1
    width = WIDTH - left - LABEL
    shapes = [_text(10, 20, title, "title")]
    for part in range(5):
        y = top + height * part / 4
        shapes.append(f'<line class="axis" x1="{left}" x2="{left + width}" y1="{y}" y2="{y}"/>')
        shapes.append(_text(left - 6, y + 4, f"{most * (4 - part) / 4:,.0f}", "quiet", "end"))
    shapes.append(_text(left + width / 2, top + height + 24, x_label, "quiet", "middle"))
    for number, (name, values) in enumerate(series.items()):
        colour = LINES[number % len(LINES)]
        step = width / max(1, len(values) - 1)
        points = " ".join(f"{left + i * step:.1f},{top + height * (1 - v / most):.1f}" for i, v in enumerate(values))
        thick = 3 if name == "pgqueue" else 1.5
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{thick}"/>')
        shapes.append(f'<rect x="{left + width + 14}" y="{top + number * 20}" width="10" height="10" fill="{colour}"/>')
        shapes.append(_text(left + width + 30, top + number * 20 + 10, name, bold=name == "pgqueue"))
    return _svg(top + height + 36, shapes)


def _legend(heads: Sequence[str], colours: Sequence[str]) -> list[str]:
    if len(heads) < 2:
        return []
    shapes, x = [], WIDTH - 160 * len(heads)
    for head, colour in zip(heads, colours, strict=False):
        shapes += [f'<rect x="{x}" y="10" width="10" height="10" fill="{colour}"/>', _text(x + 16, 20, head, "quiet")]
        x += 160
    return shapes


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start", *, bold: bool = False) -> str:
    style = ' style="font-weight:600"' if bold else ""
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}{style}>{escape(text)}</text>'


def _svg(height: float, shapes: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    body = "\n".join(shapes)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
