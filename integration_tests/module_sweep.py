"""Every module and optimizer of torch's databases, placed at random on 4 ranks.

They are compared with the single device.

    python -m integration_tests.module_sweep               # all; writes docs/module_coverage.md
    python -m integration_tests.module_sweep --only Norm   # entries with this in the name, and
                                                           # what went wrong

A module goes through `distribute_module` with random placements of its parameters, buffers and
inputs, in training and in eval mode, and through `parallelize_module` with every style. An
optimizer steps DTensor parameters with random placements in each of its forms. A case is right if
outputs, gradients, buffers, parameters and states are, on every rank, those of the single device;
otherwise it must be refused by a typed error, the same on all ranks.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from integration_tests.case_runner import kind, run_cases
from integration_tests.module_cases import (
    MOST,
    STYLES,
    ModuleCase,
    OptimizerCase,
    modules,
    optimizer_inputs,
    optimizers,
    samples,
    verdict,
)

ROOT = Path(__file__).resolve().parent.parent
FORMS = ("for-loop", "foreach", "fused")
HOW = (
    "The entries are those of torch's own databases of modules (`module_db`) and optimizers "
    "(`optim_db`), on four gloo ranks as a mesh of 4 and of 2 x 2. A module goes through "
    "`distribute_module` with random placements (uneven, ragged, with empty shards) of parameters, "
    "buffers and inputs, and through `parallelize_module` with each style; an optimizer steps "
    "DTensor parameters three times. A case is right if outputs, gradients, buffers, parameters "
    "and states are those of one device. A cell says how many of its cases are right; `-` is a "
    "style that does not know the module (`UnsupportedModuleError`)."
)
Case = ModuleCase | OptimizerCase
Outcomes = dict[Case, str]


def cases_of(name: str, *, most: int = MOST, turns: int = 2) -> Iterator[Case]:
    """The cases of an entry: at most so many samples with so many random placements each."""
    if name in optimizers():
        forms = [
            form
            for form in FORMS
            if form == "for-loop" or form in optimizers()[name].supported_impls
        ]
        for sample in range(min(most, len(optimizer_inputs(name)))):
            yield from (
                OptimizerCase(name, sample, form, turn) for form in forms for turn in range(turns)
            )
        return
    modes = (True, False) if modules()[name].train_and_eval_differ else (True,)
    for training in modes:
        count = min(most, len(samples(name, training, MOST)))
        for sample in range(count):
            yield from (
                ModuleCase(name, training, sample, "distribute", turn) for turn in range(turns)
            )
        for sample in range(min(2, count)):
            yield from (ModuleCase(name, training, sample, style, 0) for style in STYLES)


def sweep(names: Sequence[str]) -> Outcomes:
    """What became of every case of these entries."""
    found: Outcomes = {}
    for name in names:
        cases = [*cases_of(name)]
        found |= dict(zip(cases, run_cases(verdict, cases), strict=True))
        print(name, dict(Counter(kind(found[case]) or "right" for case in cases)), flush=True)
    return {case: outcome for case, outcome in found.items() if kind(outcome) != "void"}


def bad(outcomes: Outcomes) -> Outcomes:
    """The cases that are neither right nor refused."""
    return {
        case: outcome for case, outcome in outcomes.items() if kind(outcome) not in ("", "refused")
    }


def page(outcomes: Outcomes) -> str:
    """docs/module_coverage.md."""
    counts = Counter(kind(outcome) or "right" for outcome in outcomes.values())
    refused = Counter(
        outcome.split(": ")[1] for outcome in outcomes.values() if kind(outcome) == "refused"
    )
    neither = counts.total() - counts["right"] - counts["refused"]
    reasons = ", ".join(f"{count} {name}" for name, count in refused.most_common())
    names = {case.name for case in outcomes}
    lines = [
        "# Module and optimizer coverage",
        "",
        f"Written by `nox -s module_sweep` with torch {torch.__version__}; do not edit. {HOW}",
        "",
        f"**{counts['right']} of {counts.total()} cases right, {counts['refused']} refused by a "
        f"typed error on all ranks alike, {neither} neither.** Refusals: {reasons}.",
        "",
        "## Modules",
        "",
        *_table(
            outcomes,
            "module",
            [name for name in modules() if name in names],
            ("distribute", *STYLES),
        ),
        "## Optimizers",
        "",
        *_table(outcomes, "optimizer", [name for name in optimizers() if name in names], FORMS),
    ]
    if wrong := bad(outcomes):
        rows = [f"- `{case}`: {' '.join(outcome.split())[:160]}" for case, outcome in wrong.items()]
        lines += ["## Neither right nor refused", "", *rows, ""]
    return "\n".join(lines)


def _table(
    outcomes: Outcomes, title: str, names: Sequence[str], columns: Sequence[str]
) -> list[str]:
    lines = [
        f"| {title} | {' | '.join(columns)} | other refusals |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for name in names:
        row = {c: o for c, o in outcomes.items() if c.name == name}
        cells = [_cell([o for c, o in row.items() if _column(c) == column]) for column in columns]
        reasons = Counter(o.split(": ")[1] for o in row.values() if kind(o) == "refused")
        del reasons["UnsupportedModuleError"]
        described = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        lines.append(f"| {name} | {' | '.join(cells)} | {described} |")
    return [*lines, ""]


def _column(case: Case) -> str:
    return case.route if isinstance(case, ModuleCase) else case.form


def _cell(outcomes: Sequence[str]) -> str:
    if not outcomes:
        return ""
    if all(outcome.startswith("refused: UnsupportedModuleError") for outcome in outcomes):
        return "-"
    return f"{sum(not outcome for outcome in outcomes)}/{len(outcomes)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="entries whose name contains this; no page is written"
    )
    options = parser.parse_args()
    outcomes = sweep([name for name in (*modules(), *optimizers()) if options.only in name])
    for case, outcome in bad(outcomes).items():
        print(f"{case}: {outcome}")
    if not options.only:
        (ROOT / "docs" / "module_coverage.md").write_text(page(outcomes))


if __name__ == "__main__":
    main()
