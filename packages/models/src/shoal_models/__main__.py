"""Command line: `python -m shoal_models preview|verify MODEL PLAN MESH`.

The commands print the cost of a plan, or its errors. They need no ranks.

May import: planning.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal_dtensor.errors import PlanError, StyleError
from shoal_mesh import DeviceMesh, abstract_mesh
from shoal_tp_styles import preview, verify

from .planning.auto import auto_plan


def main(argv: list[str] | None = None) -> int:
    """Run the command of the arguments; return 0 on success, 1 for findings, 2 for misuse."""
    parser = argparse.ArgumentParser(
        prog="python -m shoal_models", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for run in (preview_plan, verify_plan):
        command = commands.add_parser(
            run.__name__.removesuffix("_plan"), help=run.__doc__, description=run.__doc__
        )
        command.add_argument(
            "model",
            help=(
                "package.module:name of a module or of a function that returns one, or a folder "
                "with config.json"
            ),
        )
        command.add_argument(
            "plan",
            help=(
                "auto (search a plan), own (use the model's tp_plan), package.module:name, or "
                "JSON such as {'0': 'colwise'}"
            ),
        )
        command.add_argument(
            "mesh",
            type=_mesh,
            help="sizes of the axes, with or without names: 4, 2x4, data=2,tensor=4",
        )
        command.add_argument("--axis", help="the axis of the plan; by default the last one")
        text = (
            "global shape of one example input, such as 8x16; 2x16:N draws integers below N; "
            "repeat it for further inputs"
        )
        command.add_argument(
            "--input", action="append", type=_tensor, default=[], metavar="SHAPE", help=text
        )
        command.set_defaults(run=run)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except StyleError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return status


def preview_plan(arguments: argparse.Namespace) -> int:
    """Print the cost of the plan."""
    model, plan, mesh = _subject(arguments)
    if not arguments.input:
        raise PlanError(
            "a preview needs the shapes of example inputs: --input 8x16, or --input 2x16:1000 for "
            "tokens"
        )
    sys.stdout.write(f"{preview(model, plan, mesh, *arguments.input)}\n")
    return 0


def verify_plan(arguments: argparse.Namespace) -> int:
    """Print the errors of the plan; return 0 if there are none."""
    found = verify(*_subject(arguments), *arguments.input)
    sys.stdout.write(f"{found}\n")
    return int(not found.ok)


class _PlanSubject(NamedTuple):
    """A model, its plan, and the axis of the mesh that the plan is for."""

    model: nn.Module
    plan: Any
    mesh: DeviceMesh


def _subject(arguments: argparse.Namespace) -> _PlanSubject:
    model = _model(arguments.model)
    mesh: DeviceMesh = arguments.mesh
    mesh = mesh[arguments.axis or mesh.axis_names[-1]]
    plan = _plan(arguments.plan, model, mesh, arguments.input)
    return _PlanSubject(model, plan, mesh)


def _model(text: str) -> nn.Module:
    if Path(text).exists():
        from transformers import AutoConfig, AutoModelForCausalLM  # the extra `hf`

        config = AutoConfig.from_pretrained(text)
        model: Any = AutoModelForCausalLM.from_config(config)
    else:
        named = _import_object(text)
        model = named if isinstance(named, nn.Module) else named()
    if not isinstance(model, nn.Module):
        raise PlanError(f"{text} must be an nn.Module or return one, got {type(model).__name__}")
    return model


def _plan(text: str, model: nn.Module, mesh: DeviceMesh, inputs: list[torch.Tensor]) -> Any:
    if text == "auto":
        return auto_plan(model, mesh, *inputs)
    if text == "own":
        return model.tp_plan
    return json.loads(text) if text.startswith("{") else _import_object(text)


def _import_object(text: str) -> Any:
    """Return the object `package.module:name`.

    Modules of the current folder are found too, as with `python -m`.
    """
    module, colon, name = text.partition(":")
    if not colon:
        raise PlanError(f"expected a folder or package.module:name, got {text!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return attrgetter(name)(import_module(module))


def _mesh(text: str) -> DeviceMesh:
    parts = text.split(",") if "=" in text else text.lower().split("x")
    names, _, sizes = zip(*(part.rpartition("=") for part in parts), strict=True)
    if not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            "a mesh is given by the sizes of its axes, such as 4, 2x4 or data=2,tensor=4, got "
            f"{text!r}"
        )
    return abstract_mesh(tuple(map(int, sizes)), names if all(names) else None)


def _tensor(text: str) -> torch.Tensor:
    """Return reproducible values: normal ones, or integers below the number after the colon."""
    shape, _, below = text.partition(":")
    sizes = [int(size) for size in shape.split("x")]
    generator = torch.Generator().manual_seed(0)
    if below:
        return torch.randint(int(below), sizes, generator=generator)
    return torch.randn(sizes, generator=generator)


if __name__ == "__main__":
    sys.exit(main())
