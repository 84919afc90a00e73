"""Covers: the type checker on the seeded bugs that are type errors; it rejects them without values.

Types see a collective that is left out, or left out of the backward. A wrong divisor, a stale
weight, a wrong mask or a wrong reduction of finished gradients has the types of the right program;
`certify` finds these (test_seeded_bugs.py).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hand_written_bugs as hand
from bug_table import HAND_WRITTEN
from hand_written import Axis, Block, CopyToAxis, GatherRows, ReduceFromAxis, ScatterSum, make_axes
from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import I, P, R, ShardType as S, V, spmd
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world

Types = dict[str, Any]
I_AMONG_SHARDS = r"\bI@tp.*: I cannot be combined with types that differ between ranks"
I_AND_P = r"P@tp; 8 I@tp\): I cannot be combined with P, an addend of a sum that is not done yet"
SHARDED_MLP: Types = {"*up.*": S(0), "*down.weight": S(1)}


def move(src: Any, dst: Any) -> Callable[[Any, tuple[Any, ...]], None]:
    """Return the declaration of an autograd function whose first argument moves from src to dst."""

    def declare(output: Any, args: tuple[Any, ...]) -> None:
        axis = spmd.normalize_axis("tp")
        spmd.check_source(args[0], axis, src, "a collective")
        spmd.set_type(output, spmd.moved_type(args[0], axis, dst, output.ndim))

    return declare


def declare_gather(output: Any, args: tuple[Any, ...]) -> None:
    """Declare rows of all ranks: R if the backward sums over ranks, I if it only keeps rows."""
    _, _, dim, sums = args
    move(S(dim), R if sums else I)(output, args)


def declare_reduce(output: Any, args: tuple[Any, ...]) -> None:
    """Declare a sum over ranks; in local mode the addends have the type V."""
    present = spmd.type_of(args[0])
    assert present is not None
    is_local = present.by_axis[spmd.normalize_axis("tp")] is V
    move(V if is_local else P, I)(output, args)


def declare_scatter(output: Any, args: tuple[Any, ...]) -> None:
    move(P, S(args[2]))(output, args)


@pytest.fixture(autouse=True)
def types_of_functions() -> None:
    declarations = {
        CopyToAxis: move(I, R),
        ReduceFromAxis: declare_reduce,
        GatherRows: declare_gather,
        ScatterSum: declare_scatter,
    }
    for function, declaration in declarations.items():
        spmd.declare_types(function, declaration)


def call(function: Any, *args: Any) -> Tensor:
    """Apply an autograd function."""
    output: Tensor = function.apply(*args)
    return output


class WholeLatent(hand.Latent):
    """The latent projection with both parts copied into the column-parallel layers."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, rope = torch.split(call(CopyToAxis, self.down(x), self._tp), [6, 2], -1)
        heads = torch.cat([rope] * (self.rope.in_features // 2), -1)
        mixed = self.out(torch.tanh(self.up(hidden))) + self.rope(heads)
        return call(ReduceFromAxis, mixed, self._tp)


class CopiedHeads(hand.Heads):
    """The fused head with the copy that sums the gradients."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(call(CopyToAxis, self.body(x), self._tp))
        return logits


class VocabularyLoss(nn.Module):
    """The loss of logits over shards of words, normalized by each rank alone or by all."""

    def __init__(self, tp: Axis, alone: bool) -> None:
        super().__init__()
        self._tp = tp
        self._alone = alone

    def forward(self, logits: Tensor) -> Tensor:
        if self._alone:
            return logits.logsumexp(1)
        return call(ReduceFromAxis, logits.exp().sum(1), self._tp).log()


class Case(NamedTuple):
    """A bug that the checker rejects, beside the program that is right.

    Attributes:
        bugs: functions of hand_written_bugs.
        wrong, right: models of an axis.
        shape: of this rank's input.
        kind: of the input.
        types: of parameters, by pattern; I for the others.
        right_types: where the right program declares other types.
        message: of the checker.
        is_local: whether ranks compute on tensors that are no shards of one tensor, so that the
            checker runs in local mode.
        device: "cpu" for a program whose shapes depend on values.
    """

    bugs: tuple[str, ...]
    wrong: Callable[[Axis], nn.Module]
    right: Callable[[Axis], nn.Module]
    shape: tuple[int, ...]
    message: str
    kind: Any = I
    types: Types = SHARDED_MLP
    right_types: Types | None = None
    is_local: bool = False
    device: str = "meta"


def case_of_attention(sums: bool) -> Callable[[Axis], nn.Module]:
    return lambda axis: hand.Attention(axis, "" if sums else "keys not reduced")


CASES = [
    Case(
        ("no_copy_into_column_parallel",),
        lambda tp: Block(8, tp, "no copy"),
        lambda tp: Block(8, tp),
        (4, 8),
        I_AMONG_SHARDS,
    ),
    Case(
        ("no_reduce_after_row_parallel",),
        lambda tp: Block(8, tp, "no reduce"),
        lambda tp: Block(8, tp),
        (4, 8),
        I_AND_P,
    ),
    Case(
        ("bias_before_reduce",),
        lambda tp: Block(8, tp, "bias before"),
        lambda tp: Block(8, tp),
        (4, 8),
        I_AND_P,
    ),
    Case(
        ("sequence_parallel_norm_not_reduced",),
        hand.SequenceParallel,
        hand.SequenceParallel,
        (4, 2, 8),
        I_AMONG_SHARDS,
        kind=S(1),
        right_types={**SHARDED_MLP, "norm.*": R},
    ),
    Case(
        ("latent_rope_rows_not_reduced", "latent_projection_partly_reduced_twice"),
        hand.Latent,
        WholeLatent,
        (4, 8),
        I_AMONG_SHARDS,
        types={"up.weight": V, "out.weight": V, "rope.weight": V},
        is_local=True,
    ),
    Case(
        ("fused_head_skips_reduction",),
        hand.Heads,
        CopiedHeads,
        (4, 8),
        I_AMONG_SHARDS,
        types={"head.weight": S(0)},
    ),
    Case(
        ("vocabulary_loss_without_reduction",),
        lambda tp: VocabularyLoss(tp, alone=True),
        lambda tp: VocabularyLoss(tp, alone=False),
        (4, 6),
        "logsumexp",
        kind=S(1),
    ),
    Case(
        ("keys_gathered_without_reduction",),
        case_of_attention(sums=False),
        case_of_attention(sums=True),
        (4, 6, 8),
        I_AMONG_SHARDS,
        kind=V,
        types={"*.weight": R},
        is_local=True,
    ),
    Case(
        ("router_not_reduced",),
        lambda ep: hand.Experts(ep, "router"),
        lambda ep: hand.Experts(ep, ""),
        (4, 8),
        I_AMONG_SHARDS,
        types={"experts.*": V},
        is_local=True,
        device="cpu",
    ),
]
NAMES = [" and ".join(case.bugs) for case in CASES]


def check(make: Callable[[Axis], nn.Module], case: Case, types: Types) -> None:
    """Run a forward under the checker, on tensors without memory."""
    with fake_world(2):
        axis = make_axes({"tp": 2})["tp"]
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = make(axis).to(case.device)
        checked = spmd.typecheck(local=case.is_local)
        with torch.device(case.device), spmd.set_current_mesh(mesh), checked:
            for name, parameter in model.named_parameters():
                kinds = [kind for pattern, kind in types.items() if fnmatch.fnmatch(name, pattern)]
                spmd.assert_tensor_type(parameter, {"tp": kinds[0] if kinds else I})
            x = torch.randn(case.shape, requires_grad=True)
            spmd.assert_tensor_type(x, {"tp": case.kind})
            model(x)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_bug_is_rejected_without_values(case: Case) -> None:
    with pytest.raises(SpmdTypeError, match=case.message):
        check(case.wrong, case, case.types)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_right_program_passes(case: Case) -> None:
    check(case.right, case, case.right_types or case.types)


def test_the_bugs_are_in_the_table() -> None:
    known = {bug.program.__name__ for bug in HAND_WRITTEN}
    assert {name for case in CASES for name in case.bugs} <= known
