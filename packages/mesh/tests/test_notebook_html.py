"""Covers: notebook_html.py: every text is escaped."""

from __future__ import annotations

from shoal_mesh.internal import html_table, html_text

WRONG = "<script>&\"'"


def test_every_text_is_escaped() -> None:
    table = html_table([[WRONG, 7]], header=[WRONG], caption=f"{WRONG}\nsecond line")
    assert "<script>" not in table + html_text(WRONG)
    assert table.count("&lt;script&gt;&amp;&quot;&#x27;") == 3 and "<td>7</td>" in table


def test_captions_and_headers_may_be_left_out() -> None:
    assert html_table([["a"], ["b"]]) == "<table><tr><td>a</td></tr><tr><td>b</td></tr></table>"
