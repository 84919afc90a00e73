"""The results of the operator sweep and the page that is made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

# Entries whose operator cannot work on DTensors, and why.  The sweep counts their cases like all others.
IMPOSSIBLE: dict[str, str] = {}


@dataclass
class Result:
    """What became of an entry: for each of its parts a letter per case (see `op_cases`), and the first findings."""

    name: str
    parts: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def counts(self, part: str = "") -> Counter[str]:
        """How many cases of a part, or of all, have each letter."""
        return Counter("".join(v for k, v in self.parts.items() if not part or k == part))

    @property
    def tried(self) -> bool:
        return bool(self.counts())

    @property
    def good(self) -> bool:
        counts = self.counts()
        return self.tried and not counts["w"] and not counts["f"]


def total(results: Iterable[Result], part: str = "") -> Counter[str]:
    return sum((r.counts(part) for r in results), Counter[str]())


def _right(counts: Counter[str]) -> int:
    return counts["l"] + counts["r"] + counts["g"]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def told(results: Sequence[Result]) -> str:
    """The figures in one paragraph."""
    tried = [r for r in results if r.tried]
    good, counts = sum(r.good for r in tried), total(tried)
    cases = counts.total() - counts["i"]
    return (
        f"{good} of {len(tried)} entries right in every case ({_percent(good, len(tried))}); {_right(counts)} of "
        f"{cases} cases right ({_percent(_right(counts), cases)}), {counts['w']} wrong, {counts['f']} raised an "
        "error, hung or crashed"
    )


def moved(results: Sequence[Result]) -> str:
    """What the right cases needed in communication."""
    counts = total(results)
    right = _right(counts)
    return (
        f"Of the right cases, {_percent(counts['l'], right)} ran no collective in forward and backward, "
        f"{_percent(counts['r'], right)} only reductions, {_percent(counts['g'], right)} gathered or exchanged values"
    )


def page(results: Sequence[Result], settings: str, command: str, peer: Sequence[Result]) -> str:
    """docs/op_coverage.md."""
    lines = [
        "# Operator coverage",
        "",
        f"Written by `{command}` with torch {torch.__version__} in {sum(r.seconds for r in results) / 60:.0f} minutes; "
        "do not edit.",
        "",
        f"The entries are those of torch's own operator database (`op_db`). {settings}",
        "",
        f"**shoal:** {told(results)}. {total(results)['i']} more in-place writes were refused with an `InPlaceError`, "
        "because they would have had to change how the written tensor lies.",
        "",
        f"{moved(results)}.",
        "",
    ]
    if peer:
        lines += [
            f"**torch's own DTensor, the same sweep:** {told(peer)}. {moved(peer)}. (torch has no ragged shards, so "
            "its cases have none; an entry that hangs twice is not run to its end.)",
            "",
        ]
    lines += [*_by_part(results, peer), *_not_right(results)]
    lines += ["## All entries", "", "| entry | samples | right | no collective | reductions | gathered |"]
    lines += ["|---|---|---|---|---|---|"]
    for r in sorted((r for r in results if r.good), key=lambda r: r.name):
        c = r.counts()
        lines.append(f"| {r.name} | {r.samples} | {_right(c)} | {c['l']} | {c['r']} | {c['g']} |")
    skipped = ", ".join(r.name for r in results if not r.tried)
    return "\n".join([*lines, "", f"Without a dense tensor among the inputs, or not on CPU: {skipped}.", ""])


def _by_part(results: Sequence[Result], peer: Sequence[Result]) -> list[str]:
    names = list(dict.fromkeys(part for r in results for part in r.parts))
    theirs = " torch's entries | right | torch's cases | right |" if peer else ""
    lines = [
        f"| part | entries | right | cases | right |{theirs}",
        "|---|---|---|---|---|" + "---|---|---|---|" * bool(peer),
    ]
    for part in names:
        row = [part]
        for found in (results, peer) if peer else (results,):
            parts = [c for r in found if (c := r.counts(part))]
            counts = sum(parts, Counter[str]())
            right = sum(not c["w"] and not c["f"] for c in parts)
            row += [str(len(parts)), str(right), str(counts.total() - counts["i"]), str(_right(counts))]
        lines.append("| " + " | ".join(row) + " |")
    return [*lines, ""]


def _not_right(results: Sequence[Result]) -> list[str]:
    bad = [r for r in results if r.tried and not r.good]
    if not bad:
        return []
    lines = [
        "## Entries with a case that is not right",
        "",
        "| entry | right | wrong | error | reason or first finding |",
    ]
    lines += ["|---|---|---|---|---|"]
    for r in bad:
        c = r.counts()
        first = " ".join(r.notes[0].split())[:200].replace("|", "/").replace("`", "") if r.notes else ""
        why = IMPOSSIBLE.get(r.name, f"`{first}`")
        lines.append(f"| {r.name} | {_right(c)} | {c['w']} | {c['f']} | {why} |")
    return [*lines, ""]
