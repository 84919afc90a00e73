"""Sweep over architectures of transformers, against one process and the library.

The models are run by their own and by automatic plans.

python -m integration_tests.architecture_sweep                # all; writes docs/architectures.md
python -m integration_tests.architecture_sweep --only llama   # architectures with this in the name
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from integration_tests.architectures import ARCHITECTURES, Case, build, inputs_of, verdict
from integration_tests.case_runner import kind, run_cases

from shoal_mesh import abstract_mesh
from shoal_models import auto_plan
from shoal_tp_styles import verify

ROOT = Path(__file__).resolve().parent.parent
PLANS = {
    "own": "the model's own `tp_plan`",
    "auto": "`auto_plan(model, mesh, **inputs)`",
    "peer": "the same `tp_plan` by transformers itself, with torch's DTensor",
}
WAYS = (2, 4)
HOW = (
    "Each architecture has a tiny configuration in float64. `verify` runs the plan on simulated "
    "ranks of one process; then the plan is applied on 2 and on 4 gloo ranks, with other weights "
    "and other tokens, and logits, loss, the gradients of all parameters and the tokens of greedy "
    "decoding are compared with one process. If all of them agree, the cell has the share of the "
    "parameters' bytes that a rank holds, on 2 and on 4 ranks. **wrong** means that the ranks "
    "compute other values; *refused* means that `verify` rejects the plan before, or, for "
    "transformers, that it raises an error; an empty cell means that the model does not have a "
    "plan. Models are made in memory and not loaded from files, so transformers' `KeyError` for "
    "tied heads may not occur when it loads a model itself."
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan on some ranks.

    Attributes:
        said: by `verify`: `fits`, `refuted: ...`, `unproven: ...`.
        happened: `right: SHARE`, or what is not.
        whole: parameters that an automatic plan leaves whole, with the reasons.
    """

    said: str
    happened: str
    whole: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`right`, `refused` (before anything was computed), or `wrong`."""
        if kind(self.happened) == "right":
            return "right" if self.said == "fits" else "refused"
        return "refused" if self.said != "fits" or kind(self.happened) == "error" else "wrong"

    @property
    def cell(self) -> str:
        """Of the table."""
        share = f"{float(self.happened.partition(':')[2]):.0%}" if self.name == "right" else ""
        return share or {"refused": "*refused*", "wrong": "**wrong**"}[self.name]


def predictions(name: str) -> Iterator[tuple[Case, str, dict[str, str]]]:
    """The cases of an architecture, with what `verify` says of each and what stays whole."""
    for ways in WAYS:
        model: Any = build(name)
        mesh, inputs = abstract_mesh((ways,), ("tp",)), inputs_of(name, 2, 6)
        if getattr(model, "tp_plan", None):
            entries = {
                key: style
                for key, style in model.tp_plan.items()
                if not verify(model, {key: style}, mesh).unmatched
            }
            found = verify(model, entries, mesh, **inputs)
            yield Case(name, "own", ways), "fits" if found.proven else f"refuted: {found}", {}
            yield Case(name, "peer", ways), "fits", {}
        plan = auto_plan(model, mesh, **inputs)
        said = (
            "fits"
            if plan.proven_for
            else f"refuted: {next(iter(plan.dropped.values()), 'nothing to shard')}"
        )
        yield Case(name, "auto", ways, tuple(plan.items())), said, dict(plan.whole)


def sweep(name: str) -> dict[Case, Outcome]:
    """What became of every case of an architecture."""
    said = [*predictions(name)]
    happened = run_cases(verdict, [case for case, _, _ in said], patience=90.0)
    return {
        case: Outcome(text, real, whole)
        for (case, text, whole), real in zip(said, happened, strict=True)
    }


def page(outcomes: dict[Case, Outcome]) -> str:
    """docs/architectures.md."""
    import transformers

    names = [*dict.fromkeys(case.name for case in outcomes)]
    lines = [
        "# Architectures of transformers",
        "",
        f"Written by `nox -s architecture_sweep` with torch {torch.__version__} and transformers "
        f"{transformers.__version__}, at commit {_commit()}; do not edit. {HOW}",
        "",
        *(f"- {plan} ({text}): {_total(outcomes, plan)}." for plan, text in PLANS.items()),
        "",
        f"| {len(names)} architectures | {' | '.join(PLANS)} |",
        "|---" * (len(PLANS) + 1) + "|",
    ]
    for name in names:
        cells = [
            [o.cell for c, o in outcomes.items() if (c.name, c.plan) == (name, plan)]
            for plan in PLANS
        ]
        lines.append(f"| {name} | {' | '.join(', '.join(cell) for cell in cells)} |")
    lines += ["", "## Refused or wrong", ""]
    for case, outcome in outcomes.items():
        if outcome.name != "right":
            why = outcome.happened if outcome.said == "fits" else outcome.said
            lines.append(f"- {case.name}, {case.plan}, {case.ways} ranks: {_line(why, 240)}")
    lines += ["", "## Modules that automatic plans leave whole on 4 ranks", ""]
    reasons: dict[str, list[str]] = {}
    for case, outcome in outcomes.items():
        for path, why in outcome.whole.items() if case.ways == max(WAYS) else ():
            reasons.setdefault(_line(why, 160), []).append(f"`{case.name}: {path}`")
    lines += [f"- {why}: {', '.join(paths)}" for why, paths in reasons.items()]
    return "\n".join([*lines, ""])


def _commit() -> str:
    """The commit of the sources, `-dirty` where they have changed since.

    The page itself changes all the time.
    """
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    changed = run(["git", "status", "--porcelain", "--", "packages", "integration_tests"]).stdout
    commit = run(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
    return f"{commit}{'-dirty' if changed else ''}"


def _total(outcomes: dict[Case, Outcome], plan: str) -> str:
    """How many architectures are right on all numbers of ranks, else refused or wrong on some."""
    worst: dict[str, str] = {}
    order = ("right", "refused", "wrong")
    for case, outcome in outcomes.items():
        if case.plan == plan:
            worst[case.name] = max(worst.get(case.name, "right"), outcome.name, key=order.index)
    counts = Counter(worst.values())
    return ", ".join(f"{counts[each]} {each}" for each in order)


def _line(text: str, most: int) -> str:
    return " ".join(text.split())[:most].replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="architectures whose name contains this; no page is written"
    )
    options = parser.parse_args()
    outcomes: dict[Case, Outcome] = {}
    for name in ARCHITECTURES:
        if options.only in name:
            found = sweep(name)
            print(
                name,
                {f"{case.plan}{case.ways}": each.cell for case, each in found.items()},
                flush=True,
            )
            outcomes |= found
            if not options.only:
                (ROOT / "docs" / "architectures.md").write_text(page(outcomes))
    for case, outcome in outcomes.items():
        if outcome.name != "right":
            print(
                f"{case.name} {case.plan} {case.ways}: {outcome.said[:600]}\n    ranks: "
                f"{outcome.happened}"
            )


if __name__ == "__main__":
    main()
