"""Edges of a training.

They are values out of range, layouts passed on, other settings, half numbers, watched calls.

`with_edges` adds them to a program. They are drawn apart from the program, so that a seed has the
same model, plan and optimizer with edges and without.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from integration_tests.random_modules.placing import place_tensor
from integration_tests.random_modules.program import Program
from integration_tests.random_modules.train import Run
from torch import Tensor, nn

from random_specs import draw_spec
from settings_and_refusals import Watcher, default_dtype, deterministic, unless_refused
from shoal_dtensor import (
    DTensor,
    Replicate,
    distribute_tensor,
    full_tensor,
    local_map,
    zeros,
)
from shoal_mesh import abstract_mesh

__all__ = ["EdgeRun", "with_edges", "without_watcher"]

CHANCE = 0.3
# Largest difference beside the largest value, for numbers that went through float32 and
# through half.
SINGLE, HALF = 1e-3, 0.1
Call = Callable[[Run, nn.Module], Any]


def with_edges(program: Program) -> Program:
    """The program with edges of its seed."""
    random = Random(f"edges {program.seed}")
    drawn = [
        f"{edge}:{random.choice(tuple(options))}"
        for edge, options in OPTIONS.items()
        if random.random() < CHANCE
    ]
    features = (*program.features, *drawn)
    half = draw_spec(random, abstract_mesh(program.mesh), program.sizes[:3], ops=(), ragged=0.3)
    layout = f"{list(half.placements)}, {tuple(map(tuple, half.shard_order))}"
    return replace(program, features=tuple(features), half_layout=layout)


def without_watcher(program: Program) -> Program:
    """The program, watched by nobody."""
    kept = [each for each in program.features if not each.startswith("watched")]
    return replace(program, features=tuple(kept))


# --- values out of range, on all ranks: a rank without them would go on
# ----------------------------


def _logits(run: Run, model: nn.Module) -> Any:
    """One row of logits or features for each token."""
    return model(run.batch(70)[0]).flatten(0, 1)


def _whole_logits(run: Run, model: nn.Module) -> Any:
    """The same without gradients, on all ranks."""
    rows = _logits(run, model).detach()
    if not isinstance(rows, DTensor):
        return rows
    return rows.redistribute(placements=[Replicate()] * rows.device_mesh.ndim)


def _bad_token(run: Run, model: nn.Module, number: int) -> Any:
    tokens = _plain_batch(run)[0].clone()
    tokens[-1, -1] = number
    return model(_put_whole(run, tokens))


def _token_beyond(run: Run, model: nn.Module) -> Any:
    return _bad_token(run, model, run.program.sizes[3])


def _bad_label(run: Run, model: nn.Module, number: int, **options: Any) -> Any:
    labels = _plain_batch(run)[1].flatten().clone()
    labels[-1] = number
    return F.cross_entropy(_logits(run, model), _put_whole(run, labels), **options)


def _label_beyond(run: Run, model: nn.Module) -> Any:
    return _bad_label(run, model, run.program.sizes[3])


def _bad_row(run: Run, model: nn.Module, number: int) -> Any:
    rows = _logits(run, model)
    return rows.index_select(0, _put_beside(torch.tensor([0, number]), rows))


def _bad_column(run: Run, model: nn.Module, number: int) -> Any:
    rows = _logits(run, model)
    columns = torch.zeros(len(rows), 1, dtype=torch.int64)
    columns[-1] = number
    return rows.gather(1, _put_beside(columns, rows))


def _bad_probability(run: Run, model: nn.Module) -> Any:
    rows = _whole_logits(run, model)
    return F.binary_cross_entropy(rows / rows.abs().max() + 0.5, torch.zeros_like(rows))


def _bad_chance(run: Run, model: nn.Module) -> Any:
    rows = _whole_logits(run, model)
    return torch.bernoulli(rows / rows.abs().max() + 0.5)


def _bad_weights(run: Run, model: nn.Module) -> Any:
    rows = _whole_logits(run, model)
    return torch.multinomial(rows - rows.max(), 1)


def _plain_batch(run: Run) -> tuple[Any, Any]:
    return Run(run.program, None, run.before).batch(70)


def _put_whole(run: Run, tensor: Tensor) -> Any:
    """Put a tensor on all ranks, if the program distributes its inputs."""
    if run.mesh is None or run.program.plan != "distribute":
        return tensor
    return place_tensor(tensor, run.mesh, "")


def _put_beside(tensor: Tensor, other: Any) -> Any:
    """Put a tensor on all ranks, if another one is a DTensor."""
    return place_tensor(tensor, other.device_mesh, "") if isinstance(other, DTensor) else tensor


# Those of a program with a vocabulary are void without one.
OUTSIDE_OF_VOCABULARY: dict[str, Call] = {
    "token beyond": _token_beyond,
    "token -1": partial(_bad_token, number=-1),
    "label beyond": _label_beyond,
    "label -1": partial(_bad_label, number=-1),
    "label ignored": partial(_bad_label, number=-100),
    "smooth label -1": partial(_bad_label, number=-1, label_smoothing=0.1),
    "smooth label ignored": partial(_bad_label, number=-7, label_smoothing=0.1, ignore_index=-7),
}
OUTSIDE: dict[str, Call] = {
    "row beyond": partial(_bad_row, number=1000),
    "row -1": partial(_bad_row, number=-1),
    "column beyond": partial(_bad_column, number=1000),
    "column -1": partial(_bad_column, number=-1),
    "probability": _bad_probability,
    "chance": _bad_chance,
    "weights": _bad_weights,
}


def _tried(call: Callable[[], Any]) -> Tensor:
    """Return the value of a call; minus one if its values are refused."""
    value = unless_refused(lambda: full_tensor(call().detach()))
    return torch.tensor(-1.0, dtype=torch.float64) if value is None else value


# --- layouts passed on ----------------------------------------------------------------------------


def _rebuilt(p: DTensor) -> DTensor:
    local = p.to_local().clone()
    return DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def _distributed(p: DTensor) -> DTensor:
    whole = p.full_tensor().clone()
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def _redistributed(p: DTensor) -> Any:
    whole = [Replicate()] * p.device_mesh.ndim
    return p.redistribute(placements=whole).redistribute(placements=p.placements)


def _added_to_zeros(p: DTensor) -> Any:
    start = zeros(p.shape, dtype=p.dtype, device_mesh=p.device_mesh, placements=p.placements)
    return start + p


def _mapped(p: DTensor) -> Any:
    identity = local_map(
        torch.clone,
        out_placements=list(p.placements),
        in_placements=(list(p.placements),),
        device_mesh=p.device_mesh,
    )
    return identity(p)


PASSED: dict[str, Callable[[DTensor], Any]] = {
    "from_local": _rebuilt,
    "distribute_tensor": _distributed,
    "redistribute": _redistributed,
    "zeros": _added_to_zeros,
    "local_map": _mapped,
}

# --- other settings -------------------------------------------------------------------------------


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "half autocast": partial(torch.autocast, "cpu", torch.float16),
    "default float64": partial(default_dtype, torch.float64),
    "default bfloat16": partial(default_dtype, torch.bfloat16),
    "deterministic": partial(deterministic, warn_only=True),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "anomaly": partial(torch.autograd.set_detect_anomaly, True),
}

# --- half numbers near the end of their range -----------------------------------------------------

HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "mean of rows": lambda h: h.mean(-1),
    "mean of columns": lambda h: h.mean(0),
    "l1_loss": lambda h: F.l1_loss(h, h * 0.5),
    "mse_loss": lambda h: F.mse_loss(h / 256, h / 512),
    "layer_norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "rms_norm": lambda h: F.rms_norm(h, h.shape[-1:]),
    "group_norm": lambda h: F.group_norm(h.transpose(1, 2), 2),
    "softmax": lambda h: h.softmax(-1),
    "log_softmax": lambda h: h.log_softmax(1),
    "variance": lambda h: (h / 256).var(),
    "norm": lambda h: torch.linalg.vector_norm(h / 8, torch.inf),
    "pool": lambda h: F.avg_pool1d(h, 3, 1, 1),
}

# --- a dispatch mode ------------------------------------------------------------------------------


OPTIONS = {
    "outside": (*OUTSIDE_OF_VOCABULARY, *OUTSIDE),
    "passed": tuple(PASSED),
    "switched": tuple(SETTINGS),
    "half": tuple(HALVES),
    "watched": ("forward", "backward", "step"),
}


class EdgeRun(Run):
    """A training with edges after its first step, or under a mode.

    Attributes:
        tolerances: of values that went through narrower numbers, by name, beside the largest value.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tolerances: dict[str, float] = {}

    def note_narrow(self, name: str, value: Any, tolerance: float) -> None:
        """See a value of narrower numbers."""
        self.tolerances[name] = tolerance
        self.note(name, value.detach().to(torch.float64) if isinstance(value, Tensor) else value)

    # --- a mode

    def watcher(self, stage: str) -> AbstractContextManager[Any]:
        """The mode, if it watches a stage."""
        if self.program.option("watched") != stage or self.mesh is None:
            return nullcontext()
        return Watcher()  # type: ignore[no-untyped-call]  # torch does not type it

    def loss(self, step: int, model: nn.Module) -> Any:
        with self.watcher("forward"):
            return super().loss(step, model)

    def deliver(self, loss: Any, wanted: list[Any]) -> None:
        with self.watcher("backward"):
            super().deliver(loss, wanted)

    def step(self, step: int, model: nn.Module, optimizer: Any) -> None:
        with self.watcher("step"):
            super().step(step, model, optimizer)

    # --- edges after the first step

    def renewed(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        model, optimizer = super().renewed(model, optimizer)
        for edge, visit in VISITS.items():
            if self.program.has(edge):
                self.stage = f"{edge}: {self.program.option(edge)}"
                visit(self, model)
        return model, optimizer

    def visit_outside(self, model: nn.Module) -> None:
        """Call a function with values out of range; the training goes on afterwards."""
        name = self.program.option("outside")
        if name in OUTSIDE:
            call = OUTSIDE[name]
        elif self.program.sizes[3]:
            call = OUTSIDE_OF_VOCABULARY[name]
        else:
            return
        value = _tried(lambda: call(self, model))
        self.note(f"outside: {name}", value)

    def visit_passed(self, model: nn.Module) -> None:
        """Make tensors in the placements of parameters by another call."""
        way = PASSED[self.program.option("passed")]
        for name, parameter in model.named_parameters():
            value: Any = parameter.detach()
            self.note(f"passed {name}", way(value) if isinstance(value, DTensor) else value)

    def visit_switched(self, model: nn.Module) -> None:
        """Compute with a copy in float32 in another setting, and again in the ordinary one."""
        name = self.program.option("switched")
        narrow = copy.deepcopy(model).float()
        with SETTINGS[name]():
            self._visit_copy(f"switched {name}", narrow, HALF if "autocast" in name else SINGLE)
        narrow.zero_grad()
        self._visit_copy("switched back", narrow, SINGLE)

    def _visit_copy(self, name: str, model: nn.Module, tolerance: float) -> None:
        """Note the loss and the gradients of a copy in float32."""
        tokens, target = self.batch(71)
        is_real = tokens.is_floating_point()
        out = model(tokens.float() if is_real else tokens)
        self.note(f"{name} dtype", str(out.dtype))
        if is_real:
            loss = F.mse_loss(out, target.to(out.dtype))
        else:
            loss = F.cross_entropy(out.flatten(0, 1), target.flatten())
        self.note_narrow(f"{name} loss", loss, tolerance)
        if not loss.requires_grad:
            return
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        grads = {n: full_tensor(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        self.note(f"{name} trained", sorted(grads))
        # Beside the largest gradient of all: some are zero in exact numbers, and rounding
        # elsewhere.
        joined = torch.cat([grads[n].flatten() for n in sorted(grads)])
        self.note_narrow(f"{name} gradients", joined, tolerance)

    def visit_half(self, model: nn.Module) -> None:
        """Compute with half numbers near 40,000, whose sums are out of range."""
        del model
        function = HALVES[self.program.option("half")]
        rows, length, width, _ = self.program.sizes
        count = torch.arange(rows * length * width, dtype=torch.float64)
        values = (1.25 + 0.25 * (count * (self.program.seed + 1.3)).sin()) * 40000.0
        half: Any = values.half().reshape(rows, length, width)
        if self.mesh is not None:
            half = place_tensor(half, self.mesh, self.program.half_layout)
        half.requires_grad_()
        result: Any = function(half)
        self.note_narrow("half result", result, HALF)
        result.backward(torch.ones_like(result))
        self.note_narrow("half gradient", half.grad, HALF)


VISITS: dict[str, Callable[[EdgeRun, nn.Module], None]] = {
    "outside": EdgeRun.visit_outside,
    "passed": EdgeRun.visit_passed,
    "switched": EdgeRun.visit_switched,
    "half": EdgeRun.visit_half,
}
