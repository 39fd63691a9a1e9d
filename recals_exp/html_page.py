"""One self-contained HTML page: text, tables that sort, figures in line. It loads nothing, so it can be mailed and kept.

Why no template engine: the page is a list of a few kinds of blocks, and everything put into it is escaped in one place.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """What is shown, and what the column sorts by (None: after everything else)."""

    text: str
    sort: float | str | None = None
    kind: str = ""  # a CSS class: ok, bad, unsure


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with a heading. `numbers` are the names of the columns to align right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numbers: frozenset[str] = frozenset()
    name: str = ""  # its id


@dataclass(frozen=True, slots=True)
class Figure:
    """An SVG element, and what it shows."""

    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Fold:
    """Something long under a line that opens."""

    summary: str
    text: str
    kind: str = ""


Block = str | Table | Figure | Fold | tuple[str, ...]  # a paragraph, ..., a list


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with blocks; left out if it has none."""

    name: str  # its id
    heading: str
    blocks: Sequence[Block]
    kind: str = ""


def render(title: str, sections: Sequence[Section]) -> str:
    """The page."""
    shown = [section for section in sections if section.blocks]
    links = " ".join(
        f'<a href="#{section.name}">{html.escape(section.heading)}</a>' for section in shown if section.heading
    )
    body = "\n".join(_section(section) for section in shown)
    return _PAGE.format(title=html.escape(title), style=_STYLE, script=_SCRIPT, links=links, body=body)


def _section(section: Section) -> str:
    heading = f"<h2>{html.escape(section.heading)}</h2>" if section.heading else ""
    blocks = "\n".join(_block(block) for block in section.blocks)
    return f'<section id="{section.name}" class="{section.kind}">{heading}\n{blocks}\n</section>'


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{html.escape(block)}</p>"
    if isinstance(block, Figure):
        return f"<figure>{block.svg}<figcaption>{html.escape(block.caption)}</figcaption></figure>"
    if isinstance(block, Fold):
        summary = f'<summary class="{block.kind}">{html.escape(block.summary)}</summary>'
        return f"<details>{summary}<pre>{html.escape(block.text)}</pre></details>"
    if isinstance(block, Table):
        return _table(block)
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in block) + "</ul>"


def _table(table: Table) -> str:
    side = ['class="number"' if column in table.numbers else "" for column in table.columns]
    head = "".join(
        f'<th {style} tabindex="0" scope="col" aria-sort="none">{html.escape(column).replace("_", "_<wbr>")}</th>'
        for column, style in zip(table.columns, side, strict=True)
    )
    rows = "\n".join(f"<tr>{''.join(map(_cell, row, side))}</tr>" for row in table.rows)
    name = f' id="{table.name}"' if table.name else ""
    scroll = "scroll tall" if len(table.rows) > _TALL else "scroll"
    return f'<div class="{scroll}"><table{name}><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _cell(cell: Cell, side: str) -> str:
    key = "" if cell.sort is None else html.escape(str(cell.sort), quote=True)
    kind = f' data-kind="{cell.kind}"' if cell.kind else ""
    return f'<td {side} data-sort="{key}"{kind}>{html.escape(cell.text)}</td>'


_TALL = 30  # rows; a longer table scrolls by itself

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><nav>{links}</nav></header>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light; --ink: #1d2330; --dim: #626b7a; --line: #dfe3ea; --accent: #0b6fb8; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink); background: #f6f7f9; }
header { background: #fff; border-bottom: 1px solid var(--line); padding: 18px 28px 10px; }
h1 { font-size: 22px; margin: 0 0 6px; }
h2 { font-size: 17px; margin: 0 0 10px; }
nav a { color: var(--accent); text-decoration: none; margin-right: 16px; font-size: 13px; }
main { max-width: 1280px; margin: 0 auto; padding: 18px 28px 60px; }
section { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 16px 20px; margin: 0 0 16px; }
section.answer { border-left: 5px solid var(--accent); }
section.answer p { margin: 0 0 6px; }
section.answer p:first-child { color: var(--dim); }
section.answer p:nth-child(2) { font-size: 17px; }
section.caution { border-left: 5px solid #c98a10; }
section.failed { border-left: 5px solid #c0392b; }
ul { margin: 0; padding-left: 20px; }
.scroll { overflow-x: auto; }
.tall { max-height: 560px; overflow-y: auto; }
.tall th { position: sticky; top: 0; background: #fff; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: left; padding: 5px 9px; border-bottom: 1px solid var(--line); white-space: nowrap; vertical-align: top; }
td:last-child { white-space: normal; }
th { vertical-align: bottom; cursor: pointer; color: var(--dim); font-weight: 600; white-space: normal; user-select: none; }
th.number, td.number { text-align: right; }
th[aria-sort="ascending"]::after { content: " \\25B2"; }
th[aria-sort="descending"]::after { content: " \\25BC"; }
tbody tr:hover { background: #f1f6fb; }
td[data-kind="ok"], summary.ok { color: #217a3c; }
td[data-kind="bad"], summary.bad { color: #c0392b; font-weight: 600; }
td[data-kind="unsure"], summary.unsure { color: #a06a00; }
figure { margin: 0 0 8px; }
figure svg { max-width: 100%; height: auto; display: block; }
figcaption { color: var(--dim); font-size: 13px; }
details { border-bottom: 1px solid var(--line); padding: 4px 0; }
summary { cursor: pointer; font-size: 13px; }
pre { white-space: pre-wrap; font-size: 12px; background: #f6f7f9; padding: 8px; border-radius: 6px; overflow-x: auto; }
@media print { body { background: #fff; } section { break-inside: avoid; border: none; } nav { display: none; } }
"""

_SCRIPT = """
"use strict";
function sortBy(heading) {
  const table = heading.closest("table"), body = table.tBodies[0];
  const column = Array.from(heading.parentNode.children).indexOf(heading);
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const other of heading.parentNode.children) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[column].dataset.sort;
  const order = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === "");  // nothing measured: last, either way
    const [p, q] = [Number(x), Number(y)];
    const by = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y, "en", {numeric: true}) : p - q;
    return down ? -by : by;
  };
  body.append(...Array.from(body.rows).sort(order));
}
for (const heading of document.querySelectorAll("th")) {
  heading.addEventListener("click", () => sortBy(heading));
  heading.addEventListener("keydown", event => { if (event.key === "Enter") sortBy(heading); });
}
"""
