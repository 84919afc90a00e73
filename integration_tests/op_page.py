"""The results of the operator sweep and the page that is made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

HOW = """\
The entries are the entries of torch's own operator database (`op_db`). Each entry runs on four gloo
ranks, as a mesh of 4 and as a mesh of 2 x 2:

- `main`: all samples in the widest dtype, with at least 24 cases together;
- `every`: one sample with every combination of its tensors' placements on one axis, up to 128;
- `even`: at most two samples with sizes that divide evenly;
- `inplace`: at most two samples of the in-place form;
- one sample in each other dtype.

A case places each tensor as replicated, sharded along any dim (evenly or not, with empty shards),
sharded raggedly, or partial. A case is right if, on every rank, the outputs and the gradients of
all inputs equal the results of a single device. Lists of positions that torch reads on the host
before any dispatch (the second argument of `tensor_split`) stay plain tensors."""
# Entries whose operator cannot work on DTensors, and why.  The sweep counts their cases like all
# others.
IMPOSSIBLE: dict[str, str] = {}


@dataclass
class Result:
    """What became of an entry.

    Attributes:
        name: of the entry.
        parts: for each part a letter per case (see `op_cases`).
        samples: how many samples the main part had.
        notes: the first findings.
        seconds: what it took.
        code: on which state of the system under test.
    """

    name: str
    parts: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    code: str = ""

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


def described(results: Sequence[Result]) -> str:
    """The figures in one paragraph."""
    tried = [r for r in results if r.tried]
    good, counts = sum(r.good for r in tried), total(tried)
    cases = counts.total() - counts["i"]
    return (
        f"{good} of {len(tried)} entries right in every case ({_percent(good, len(tried))}); "
        f"{_right(counts)} of {cases} cases right ({_percent(_right(counts), cases)}), "
        f"{counts['w']} wrong, {counts['f']} raised an error, hung or crashed"
    )


def moved(results: Sequence[Result]) -> str:
    """What the right cases needed in communication."""
    counts = total(results)
    right = _right(counts)
    return (
        f"{_percent(counts['l'], right)} of the right cases ran no collective in forward and "
        f"backward, {_percent(counts['r'], right)} ran reductions only, "
        f"{_percent(counts['g'], right)} gathered or exchanged values"
    )


def _refused_writes(results: Sequence[Result]) -> str:
    """Return the sentence about in-place writes, which do not count as cases."""
    count = total(results)["i"]
    if not count:
        return "No in-place write was refused."
    return (
        f"{count} more in-place writes were refused with an `InPlaceError`, because they would "
        "have had to change the layout of the written tensor."
    )


def page(
    results: Sequence[Result], sample: Sequence[Result], peer: Sequence[Result], code: str
) -> str:
    """docs/op_coverage.md.

    Args:
        code: the state of the code for which the page is written.
        results: of the whole sweep.
        sample, peer: of a sample of its cases, and of the same sample on torch's own DTensor; empty
            if there is none.
    """
    minutes = sum(r.seconds for r in results) / 60
    older = sum(r.code != code for r in results)
    state = (
        f"All {len(results)} entries ran on the sources with digest {code}"
        if not older
        else f"{older} of {len(results)} entries ran on sources before those of {code}"
    )
    lines = [
        "# Operator coverage",
        "",
        f"Written by `nox -s op_sweep` with torch {torch.__version__}; do not edit.",
        "",
        HOW,
        "",
        f"The sweep takes {minutes:.0f} minutes of four ranks on two cores; `-- --share 1/2` and "
        "`-- --share 2/2` side by side take less, and `nox -s op_sweep` then writes the page from "
        f"both. {state}.",
        "",
        f"**shoal:** {described(results)}. {_refused_writes(results)}",
        "",
        f"{moved(results)}.",
        "",
        *_by_part(results, []),
        *(_beside(sample, peer) if sample and peer else []),
        *_not_right(results),
        "## All entries",
        "",
        "| entry | samples | right | no collective | reductions | gathered |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted((r for r in results if r.good), key=lambda r: r.name):
        c = r.counts()
        lines.append(f"| {r.name} | {r.samples} | {_right(c)} | {c['l']} | {c['r']} | {c['g']} |")
    skipped = ", ".join(r.name for r in results if not r.tried)
    return "\n".join(
        [*lines, "", f"Without a dense tensor among the inputs, or not on CPU: {skipped}.", ""]
    )


def _beside(sample: Sequence[Result], peer: Sequence[Result]) -> list[str]:
    """The sample of the cases on which torch's own DTensor ran too."""
    return [
        "## Beside torch's own DTensor",
        "",
        "A sample of the cases, on both (`nox -s op_sweep -- --sample`, and with `--peer`): at "
        "most three samples with at least nine cases, one of even sizes, one in place. torch does "
        "not have ragged shards, so its cases leave them out. Its refusals to write in place are "
        "not counted as cases, as for shoal. An error on some ranks while the others wait counts "
        "as one failed case, and after four such errors the rest of a part is left out.",
        "",
        f"**shoal:** {described(sample)}. {moved(sample)}.",
        "",
        f"**torch:** {described(peer)}. {moved(peer)}.",
        "",
        *_by_part(sample, peer),
    ]


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
            row += [
                str(len(parts)),
                str(right),
                str(counts.total() - counts["i"]),
                str(_right(counts)),
            ]
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
        first = (
            " ".join(r.notes[0].split())[:200].replace("|", "/").replace("`", "") if r.notes else ""
        )
        why = IMPOSSIBLE.get(r.name, f"`{first}`")
        lines.append(f"| {r.name} | {_right(c)} | {c['w']} | {c['f']} | {why} |")
    return [*lines, ""]
