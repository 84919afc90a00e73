"""False alarms of the checker of types on transformers' models.

`python -m integration_tests.typed_architectures NAMES` prints them; all architectures by default.

A model is checked by its own plan twice: with its modules in styles, and as the program that `emit`
writes.  Both are right (docs/architectures.md), so every error is a false alarm, or a limit that
the error names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from integration_tests.architectures import ARCHITECTURES, VOCABULARY, build
from integration_tests.emitted import program_of

from shoal_dtensor import DTensor
from shoal_dtensor.errors import SpmdTypeError
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_spmd_types import EmissionError, I, assert_type, set_current_mesh, typecheck
from shoal_tp_styles import UnmatchedPlanWarning, parallelize_module

__all__ = ["alarm_of_program", "alarm_of_styles"]

RANKS = 2


def alarm_of_styles(name: str) -> str:
    """The checker's error about a styled model in global mode; empty if it passes."""
    model: Any = build(name)
    if not getattr(model, "tp_plan", None):
        return ""
    with fake_world(RANKS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmatchedPlanWarning)
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, model.tp_plan)
        with set_current_mesh(mesh), typecheck(local=False):
            for tensor in (*model.parameters(), *model.buffers()):
                if not isinstance(tensor, DTensor):
                    assert_type(tensor, {"tp": I})
            tokens = assert_type(torch.randint(3, VOCABULARY, (2, 6)), {"tp": I})
            try:
                model(input_ids=tokens, use_cache=False)
            except SpmdTypeError as error:
                return str(error)
    return ""


def alarm_of_program(name: str) -> tuple[str, str]:
    """The checker's error about an emitted model, and another reason why there is no program."""
    tokens = torch.randint(3, VOCABULARY, (2, 6))
    model: Any = build(name)
    if not getattr(model, "tp_plan", None):
        return "", "no plan"
    try:
        program_of(model, abstract_mesh((RANKS,), ("tp",)), tokens)
    except EmissionError as error:
        is_alarm = isinstance(error.__cause__, SpmdTypeError)
        return (str(error), "") if is_alarm else ("", str(error))
    return "", ""


def main(names: Sequence[str]) -> None:
    """Print the alarms, and how many models pass."""
    passed = {"styles": 0, "program": 0}
    for name in names or ARCHITECTURES:
        alarm = alarm_of_styles(name)
        of_program, reason = alarm_of_program(name)
        passed["styles"] += not alarm
        passed["program"] += not of_program and not reason
        print(
            f"{name}\n  styles: {alarm or 'ok'}\n  program: {of_program or reason or 'ok'}",
            flush=True,
        )
    print(passed)


if __name__ == "__main__":
    main(sys.argv[1:])
