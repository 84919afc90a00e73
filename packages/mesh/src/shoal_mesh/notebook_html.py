"""HTML that notebooks show for values: escaped texts and tables.

May import: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def html_table(
    rows: Iterable[Sequence[object]], *, header: Sequence[object] = (), caption: str = ""
) -> str:
    """Return an HTML table of values as text; every text is escaped.

    Args:
        rows: the cells of each row.
        header: names of the columns; no such row when left out.
        caption: text above the table.

    Example:
        >>> html_table([["0", "<a>"]], header=["rank", "name"])
        '<table><tr><th>rank</th><th>name</th></tr><tr><td>0</td><td>&lt;a&gt;</td></tr></table>'
    """
    from html import escape  # 2 ms, for notebooks only

    lines = []
    if caption:
        # several lines, such as a report, keep their breaks
        lines.append(f'<caption style="white-space:pre-wrap">{escape(caption)}</caption>')
    if header:
        headings = "".join(f"<th>{escape(str(name))}</th>" for name in header)
        lines.append(f"<tr>{headings}</tr>")
    for row in rows:
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def html_text(text: str) -> str:
    """Return a text as HTML that keeps its lines.

    Example:
        >>> html_text("Shard(0) -> Replicate()")
        '<pre>Shard(0) -&gt; Replicate()</pre>'
    """
    from html import escape  # 2 ms, for notebooks only

    return f"<pre>{escape(text)}</pre>"
