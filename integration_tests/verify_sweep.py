"""Plans of transformers' architectures: what `verify` says without ranks, against what happens on ranks.

python -m integration_tests.verify_sweep                  # all of it; writes docs/verify_coverage.md
python -m integration_tests.verify_sweep --only llama     # architectures whose name contains it
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from integration_tests.architectures import ARCHITECTURES, Case, build, inputs_of, plan_of, verdict
from integration_tests.case_runner import kind, run_cases

from shoal_mesh import abstract_mesh
from shoal_tp_styles import auto_plan, verify

ROOT = Path(__file__).resolve().parent.parent
PLANS = {
    "own": "the model's own `tp_plan`",
    "names": "`auto_plan(model)`, by names alone",
    "proven": "`auto_plan(model, mesh, **inputs)`, where it drops entries",
}
WAYS = (2, 4)
HOW = (
    "Each architecture has a tiny configuration in float64. `verify` runs the plan on simulated ranks of one process; "
    "then the plan is applied on so many gloo ranks, with other weights and other tokens, and logits, loss and the "
    "gradients of all parameters are compared with one process."
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `verify` says (`fits`, `refuted: ...`, `unproven: ...`), and what happens on ranks ("" if right)."""

    said: str
    happened: str

    @property
    def name(self) -> str:
        """How the two fit together."""
        if self.said == "fits":
            return "false fits" if self.happened else "fits, right"
        return f"{kind(self.said)}, {'does not fit' if self.happened else 'right'}"


def predictions(names: Sequence[str]) -> Iterator[tuple[Case, str]]:
    """The cases of these architectures, with what `verify` says of each."""
    for name in names:
        for ways in WAYS:
            model, mesh, inputs = build(name), abstract_mesh((ways,), ("tp",)), inputs_of(name, 2, 6)
            for plan in ("own", "names"):
                case = Case(name, plan, ways)
                if entries := plan_of(model, case):
                    found = verify(model, entries, mesh, **inputs)
                    yield case, "fits" if found.proven else f"{'unproven' if found.ok else 'refuted'}: {found}"
            proven = auto_plan(model, mesh, **inputs)
            if proven and proven.dropped:
                yield Case(name, "proven", ways, tuple(proven)), "fits"


def sweep(names: Sequence[str]) -> dict[Case, Outcome]:
    """Both for every case of these architectures."""
    outcomes: dict[Case, Outcome] = {}
    for name in names:
        said = dict(predictions([name]))
        happened = run_cases(verdict, [*said], patience=60.0)
        found = {case: Outcome(text, real) for (case, text), real in zip(said.items(), happened, strict=True)}
        print(name, dict(Counter(each.name for each in found.values())), flush=True)
        outcomes |= found
    return outcomes


def page(outcomes: dict[Case, Outcome]) -> str:
    """docs/verify_coverage.md."""
    import transformers

    counts = Counter(outcome.name for outcome in outcomes.values())
    names = [*dict.fromkeys(case.name for case in outcomes)]
    lines = [
        "# Verdicts on plans of transformers",
        "",
        f"Written by `nox -s verify_sweep` with torch {torch.__version__} and transformers {transformers.__version__}; "
        f"do not edit. {HOW}",
        "",
        f'**{len(names)} architectures, {len(outcomes)} plans; {counts["false fits"]} false "fits".** '
        + ", ".join(f"{count} {name}" for name, count in counts.most_common())
        + ".",
        "",
        "A cell has the verdict on 2 and on 4 ranks, in italics where the ranks show something else. Plans: "
        + ", ".join(f"{name} ({text})" for name, text in PLANS.items())
        + ".",
        "",
        f"| architecture | {' | '.join(PLANS)} |",
        "|---" * (len(PLANS) + 1) + "|",
    ]
    for name in names:
        cells = [[_cell(o) for c, o in outcomes.items() if (c.name, c.plan) == (name, plan)] for plan in PLANS]
        lines.append(f"| {name} | {' | '.join(', '.join(dict.fromkeys(cell)) for cell in cells)} |")
    lines += ["", "## Not fitting, by `verify`", ""]
    for case, outcome in outcomes.items():
        if outcome.said != "fits" and case.ways == max(WAYS):
            lines.append(f"- {case.name}, {case.plan}: {' '.join(outcome.said.split())[:180]}")
    return "\n".join([*lines, ""])


def _cell(outcome: Outcome) -> str:
    said = kind(outcome.said)
    return said if bool(outcome.happened) != (said == "fits") else f"*{outcome.name}*"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architectures whose name contains this; no page is written")
    options = parser.parse_args()
    outcomes = sweep([name for name in ARCHITECTURES if options.only in name])
    for case, outcome in outcomes.items():
        if outcome.name not in ("fits, right", "refuted, does not fit"):
            print(f"{case}: verify: {outcome.said[:600]}\n    ranks: {outcome.happened or 'right'}")
    if not options.only:
        (ROOT / "docs" / "verify_coverage.md").write_text(page(outcomes))


if __name__ == "__main__":
    main()
