"""Training of a model, plain or on a mesh by the same code, and the values to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from integration_tests.random_modules.placing import place_model, place_tensor
from integration_tests.random_modules.program import Program, model_of
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import shoal_dtensor
from shoal_dtensor import (
    DTensor,
    checked_replicas,
    communication,
    get_optimizer_state_dict,
    implicit_replication,
    random_mode,
)
from shoal_mesh import DeviceMesh
from shoal_tp_styles import loss_parallel

__all__ = ["FEATURES", "run"]

FEATURES = {
    "tie": "head and embedding share their weight",
    "share": "the last block is the first",
    "accumulate": "two backward passes a step",
    "clip": "gradients clipped: 2, inf, 1, value, foreach, ours",
    "checkpoint": "blocks checkpointed: reentrant, plain, selective",
    "hook": "hooks: parameter, before, accumulated, activation, forward, backward, foreign",
    "state": "state dicts of model and optimizer go through a round trip after the first step",
    "copy": "model and optimizer are deep copies after the first step",
    "freeze": "a parameter that needs no gradient",
    "evaluate": "a pass in eval mode between the steps",
    "zero": "gradients are set to zero, not to None",
    "functional": "the model is called by torch.func.functional_call",
    "grad": "gradients come from torch.autograd.grad",
    "inputs": (
        "gradients come from backward(inputs=...): all, halves (one after the other, as split "
        "schedules do)"
    ),
    "read": "the optimizer's state is read before every step",
    "scope": "forward is in a scope of shoal's (`SCOPES`), backward too, or (after) behind it",
    "closure": "the optimizer is given a closure",
    "average": "an AveragedModel follows",
    "groups": "two parameter groups",
    "schedule": "a learning rate schedule",
}


@contextmanager
def _replicated() -> Iterator[None]:
    """Plans of plain tensors and DTensors mixed promise things of the plain ones.

    They are often not so, therefore ranks compare them.
    """
    with implicit_replication(), checked_replicas():
        yield


SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "allowed": partial(communication, "allow"),
    "replicated": _replicated,
    "loss": loss_parallel,
    "single": partial(random_mode, "single_device"),
}


class Run:
    """One training of a program: the plain one, or that on a mesh.

    Attributes:
        before: what changes the model before it is placed.
        seen: everything to compare, by name, in the order it came.
        stage: what is being done, for messages.
    """

    def __init__(
        self, program: Program, mesh: DeviceMesh | None, before: Callable[[nn.Module], None]
    ) -> None:
        self.program, self.mesh, self.before = program, mesh, before
        self.seen: dict[str, Any] = {}
        self.stage = "model"
        self.layouts = dict(program.layouts) if program.plan == "distribute" else {}

    def put(self, tensor: Tensor, name: str) -> Any:
        """An input or a target, placed if the program distributes them."""
        if self.mesh is None or self.program.plan != "distribute":
            return tensor
        return place_tensor(tensor, self.mesh, self.layouts.get(name, ""))

    def note(self, name: str, value: Any) -> None:
        """See a value as it is now."""
        self.seen[name] = value.detach().clone() if isinstance(value, Tensor) else value

    def train(self) -> None:
        """All steps."""
        program = self.program
        model: nn.Module = model_of(program)
        self.before(model)
        if freeze := program.option("freeze"):
            dict(model.named_parameters())[freeze].requires_grad_(False)
        if program.option("hook") == "before":
            first: Any = next(p for p in model.parameters() if p.requires_grad)
            first.register_hook(lambda g: g * 0.5)
        if self.mesh is not None:
            self.stage = "placing"
            model = place_model(program, model, self.mesh)
        self.stage = "hooks"
        _hooks(program.option("hook"), model)
        self.stage = "optimizer"
        optimizer = self.optimizer(model)
        schedule = (
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if program.has("schedule") else None
        )
        follower = torch.optim.swa_utils.AveragedModel(model) if program.has("average") else None
        for step in range(program.steps):
            torch.manual_seed(program.seed + step)
            if self.mesh is not None and program.has("read"):
                self.stage = "reading"
                get_optimizer_state_dict(model, optimizer)
            self.step(step, model, optimizer)
            if schedule is not None:
                schedule.step()
            if follower is not None:
                self.stage = "averaged model"
                follower.update_parameters(model)
            self.stage = "state dicts or copies"
            model, optimizer = self.renewed(model, optimizer) if step == 0 else (model, optimizer)
            if program.has("evaluate"):
                self.evaluate(step, model)
        self.note("generator", torch.get_rng_state())
        self.end(model, optimizer, follower)

    def optimizer(self, model: nn.Module) -> Any:
        """The program's optimizer over the model's parameters."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups: list[Any] = parameters
        if self.program.has("groups") and len(parameters) > 1:
            groups = [{"params": parameters[::2], "lr": 0.01}, {"params": parameters[1::2]}]
        return eval(self.program.optimizer, {"torch": torch, "groups": groups})

    def batch(self, step: int) -> tuple[Any, Any]:
        """Inputs and targets, the same for both trainings."""
        b, t, d, vocabulary = self.program.sizes
        generator = torch.Generator().manual_seed(self.program.seed * 100 + step)
        if vocabulary:
            x = torch.randint(0, vocabulary, (b, t), generator=generator)
            return self.put(x, "input"), self.put(
                torch.randint(0, vocabulary, (b, t), generator=generator), "target"
            )
        x = torch.randn(b, t, d, generator=generator, dtype=torch.float64)
        return self.put(x, "input"), self.put(
            torch.randn(x.shape, generator=generator, dtype=x.dtype), "target"
        )

    def loss(self, step: int, model: nn.Module) -> Any:
        """The loss of a batch, its output noted."""
        x, target = self.batch(step)
        around = _around(self.program)
        self.stage = "forward"
        if self.program.has("functional"):
            out = torch.func.functional_call(model, dict(model.named_parameters()), (x, around))
        else:
            out = model(x, around)
        if self.program.option("hook") == "activation":
            out.register_hook(lambda g: g.clamp(-0.05, 0.05))
        if self.program.option("hook") == "foreign":
            out.register_hook(
                lambda g: torch.linspace(-1, 1, g.numel(), dtype=g.dtype).view(g.shape)
            )
        self.note(f"output {step}", out)
        if self.program.sizes[3]:
            return F.cross_entropy(out.flatten(0, 1), target.flatten())
        return F.mse_loss(out, target)

    def backward(self, step: int, model: nn.Module) -> Any:
        """Gradients of all parameters; the loss."""
        loss: Any = None
        passes = 2 if self.program.has("accumulate") else 1
        for turn in range(passes):
            with ExitStack() as scope:
                if self.mesh is not None:
                    scope.enter_context(
                        SCOPES[self.program.option("scope").removesuffix(" after")]()
                    )
                loss = self.loss(2 * step + turn, model)
                if self.program.option("scope").endswith("after"):
                    scope.close()
                self.stage = "backward"
                self.deliver(loss, [p for p in model.parameters() if p.requires_grad])
        return loss

    def deliver(self, loss: Any, wanted: list[Any]) -> None:
        """Gradients of one loss, by one backward or by several."""
        kind = self.program.option("inputs")
        if self.program.has("grad"):
            grads: Any = torch.autograd.grad(loss, wanted, allow_unused=True)
            for p, g in zip(wanted, grads, strict=True):
                # torch's fused optimizers ask for the parameter's strides
                g = g if g is None else g.contiguous()
                p.grad = g if p.grad is None or g is None else p.grad + g
        elif kind == "halves" and len(wanted) > 1:
            loss.backward(inputs=wanted[::2], retain_graph=True)
            loss.backward(inputs=wanted[1::2])
        elif kind:
            loss.backward(inputs=wanted)
        else:
            loss.backward()

    def step(self, step: int, model: nn.Module, optimizer: Any) -> None:
        """One step of the optimizer."""

        def closure() -> Any:
            optimizer.zero_grad(set_to_none=not self.program.has("zero"))
            loss = self.backward(step, model)
            self.note(f"loss {step}", loss)
            for name, p in model.named_parameters():
                self.note(f"gradient of {name} {step}", p.grad)
                if p.grad is not None and isinstance(p, DTensor):
                    assert isinstance(p.grad, DTensor), f"the gradient of {name} is plain"
                    assert p.grad.placements == p.placements, (
                        f"{name} is {p.placements}, gradient {p.grad.placements}"
                    )
            self.stage = "clipping"
            self.clip(step, model)
            # no element without a gradient: its sign would be that of a rounding error
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.add_(p, alpha=0.01)
            return loss

        if self.program.has("closure") or "LBFGS" in self.program.optimizer:
            optimizer.step(closure)
        else:
            closure()
            self.stage = "step"
            optimizer.step()
        for name, p in model.named_parameters():
            self.note(f"{name} {step}", p)
        for name, b in model.named_buffers():
            self.note(f"{name} {step}", b)

    def clip(self, step: int, model: nn.Module) -> None:
        """Clip gradients as the program says."""
        kind = self.program.option("clip")
        if not kind:
            return
        parameters = list(model.parameters())
        if kind == "value":
            torch.nn.utils.clip_grad_value_(parameters, 0.01)
        elif kind == "ours":
            self.note(f"norm {step}", shoal_dtensor.clip_grad_norm_(parameters, 0.1))
        elif kind == "foreach":
            self.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(parameters, 0.1, foreach=True))
        else:
            self.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(parameters, 0.1, float(kind)))

    def renewed(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """Model and optimizer after a round trip, where the program makes one."""
        if self.program.has("copy"):
            states = optimizer.state_dict()
            model = copy.deepcopy(model)
            optimizer = self.optimizer(model)
            optimizer.load_state_dict(states)
        if self.program.has("state"):
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            self.note("keys", model.load_state_dict(weights))
            states = copy.deepcopy(optimizer.state_dict())
            optimizer = self.optimizer(model)
            optimizer.load_state_dict(states)
        return model, optimizer

    def evaluate(self, step: int, model: nn.Module) -> None:
        """A pass without gradients."""
        self.stage = "evaluation"
        model.eval()
        with torch.no_grad():
            self.note(f"evaluated {step}", model(self.batch(step + 50)[0]))
        model.train()

    def end(self, model: nn.Module, optimizer: Any, follower: Any) -> None:
        """What the training leaves: names and states."""
        self.stage = "end"
        self.note("state dict", sorted(model.state_dict()))
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items() if isinstance(state, dict) else ():
                self.note(
                    f"state {index} {key}",
                    value if isinstance(value, Tensor | int | float) else None,
                )
        for name, p in follower.named_parameters() if follower is not None else ():
            self.note(f"average of {name}", p)


def _halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def _hooks(kind: str, model: nn.Module) -> None:
    """Hooks that a user sets on parameters and modules."""
    parameter: Any = next((p for p in model.parameters() if p.requires_grad), None)
    blocks: Any = model.blocks
    if kind == "parameter" and parameter is not None:
        parameter.register_hook(lambda g: g * 0.5 + 0.01)
    if kind == "accumulated" and parameter is not None:
        parameter.register_post_accumulate_grad_hook(_halve)
    if kind == "forward" and blocks:
        blocks[0].register_forward_hook(lambda module, args, out: out * 2)
        blocks[0].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    if kind == "backward" and blocks:
        blocks[0].register_full_backward_hook(
            lambda module, grads, outs: tuple(g * 2 for g in grads)
        )


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = str(op).split(".")[1] in (
        "mm",
        "addmm",
        "bmm",
        "all_reduce",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _around(program: Program) -> Any:
    """What runs a block; None if nothing special does."""
    kind = program.option("checkpoint")
    if not kind:
        return None
    options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return lambda block, x: checkpoint(block, x, **options)


R = TypeVar("R", bound=Run)


@contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(
    program: Program,
    mesh: DeviceMesh | None,
    before: Callable[[nn.Module], None] = lambda model: None,
    kind: type[R] = Run,  # type: ignore[assignment]  # a default of a type variable
) -> tuple[R, Exception | None]:
    """A training of a model that `before` may change first, and what ended it early.

    Args:
        program: the program.
        mesh: the mesh; None for one device.
        before: what changes the model before it is placed.
        kind: the class of the training.
    """
    made = kind(program, mesh, before)
    with _quiet():
        try:
            made.train()
        except Exception as error:  # whatever it is, it is the result
            return made, error
    return made, None
