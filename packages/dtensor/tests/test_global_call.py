"""A call on few elements has the output metadata of the whole call.

Covers: dispatch/global_call.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from operator_calls import recorded
from shoal_dtensor import Replicate, Shard, ShoalTensorError, Spec, TensorMeta, distribute_tensor
from shoal_dtensor._torch.operators import results_of
from shoal_dtensor.dispatch import global_call
from shoal_dtensor.dispatch.global_call import outputs_by_meta_kernel, outputs_by_probe
from shoal_dtensor.dispatch.propagate import decide, rule_of
from shoal_dtensor.errors import OperatorArgumentError
from shoal_dtensor.layout.memory_order import contiguous_stride
from shoal_dtensor.rules.all_rules import TABLE
from shoal_dtensor.scopes import DEFAULT
from shoal_mesh import DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.testing import fake_world

aten = torch.ops.aten
MESH, ACCELERATOR = abstract_mesh((2,)), abstract_mesh((2,), device_type="cuda")
F32, F16, INT, BOOL = torch.float32, torch.float16, torch.int64, torch.bool

# Sizes by letter: equal letters are equal sizes, of expanded dims if they are capitals; digits are
# themselves.
CALLS: list[tuple[Any, ...]] = [
    (aten.add.Tensor, "ab", "ab"),
    (aten.add.Tensor, "ab", "b"),
    (aten.add.Tensor, "a1", "1b"),
    (aten.add.Tensor, "ab", 2),
    (aten.add_.Tensor, "ab", "b"),
    (aten.mul.Tensor, "aa", "aa"),
    (aten.relu.default, "abc"),
    (aten.sub.Tensor, "", "ab"),
    (aten.mm.default, "ab", "bc"),
    (aten.mm.default, "aa", "aa"),
    (aten.mm.default, "0b", "bc"),
    (aten.addmm.default, "c", "ab", "bc"),
    (aten.bmm.default, "abc", "acd"),
    (aten.linear.default, "abc", "dc", "d"),
    (aten.sum.dim_IntList, "abc", [0]),
    (aten.sum.dim_IntList, "abc", [1, 2], True),
    (aten.sum.default, "ab"),
    (aten.mean.dim, "abc", [1]),
    (aten.amax.default, "ab", [1]),
    (aten._softmax.default, "abc", 2, False),
    (aten._softmax.default, "abc", 0, False),
    (aten._log_softmax.default, "ab", 1, False),
    (aten._softmax_backward_data.default, "ab", "ab", 1, F32),
    (aten.native_layer_norm.default, "abc", ["c"], "c", "c", 1e-5),
    (aten.native_layer_norm.default, "abc", ["b", "c"], None, None, 1e-5),
    (
        aten.native_layer_norm_backward.default,
        "abc",
        "abc",
        ["c"],
        "ab1",
        "ab1",
        "c",
        "c",
        [True, True, True],
    ),
    (aten.t.default, "ab"),
    (aten.transpose.int, "abc", 0, -1),
    (aten.permute.default, "abc", [2, 0, 1]),
    (aten.unsqueeze.default, "ab", 1),
    (aten.where.ScalarOther, ("ab", BOOL), "ab", 1.0),
    (aten._to_copy.default, "ab", {"dtype": F16}),
    (aten.threshold_backward.default, "ab", "ab", 0),
    (aten.threshold_backward.default, "AB", "ab", 0),
    (aten.div.Scalar, "AB", 2),
    (aten.mul.Tensor, "AbC", "abc"),
    (aten.mul.Tensor, "abc", "aBc"),
    (aten.relu.default, "aB"),
    (aten.t.default, "aB"),
    (aten.ones_like.default, "bC", {"dtype": F16, "memory_format": torch.preserve_format}),
    (aten.empty_like.default, "abc", {"pin_memory": False}),
    (aten.relu_.default, "aB"),
    (aten._softmax_backward_data.default, "ABC", "abc", 2, F32),
    (
        aten.native_layer_norm_backward.default,
        "ABC",
        "abc",
        ["c"],
        "ab1",
        "ab1",
        "c",
        "c",
        [True, True, True],
    ),
    (aten.linalg_vector_norm.default, "abc", 2, [1]),
    (aten.linalg_vector_norm.default, "ab", float("inf")),
    (aten.logsumexp.default, "ab", [1]),
    (aten.cumsum.default, "ab", 1),
    (aten.mse_loss.default, "ab", "ab"),
    (aten.mse_loss_backward.default, "", "ab", "ab", 1),
    (aten.binary_cross_entropy_with_logits.default, "ab", "ab"),
    (aten.nll_loss_forward.default, "ab", ("a", INT), None, 1, -100),
    (aten.nll_loss_backward.default, "", "ab", ("a", INT), None, 1, -100, ""),
]


def shape_of(letters: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(letter) if letter.isdigit() else sizes[letter.lower()] for letter in letters)


def stride_of(letters: str, shape: Sequence[int]) -> tuple[int, ...]:
    kept = [1 if letter.isupper() else size for letter, size in zip(letters, shape, strict=True)]
    steps = zip(letters, contiguous_stride(kept), strict=True)
    return tuple(0 if letter.isupper() else step for letter, step in steps)


def with_sizes(call: Sequence[Any], sizes: Mapping[str, int]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call in `CALLS`, tensors as metas."""
    args: list[Any] = []
    for value in call[1:]:
        letters, dtype = value if isinstance(value, tuple) else (value, F32)
        if isinstance(letters, str):
            shape = shape_of(letters, sizes)
            args.append(TensorMeta(shape, stride_of(letters, shape), dtype))
        elif isinstance(value, list) and value and isinstance(value[0], str):
            args.append([sizes[letter] for letter in value])
        elif not isinstance(value, dict):
            args.append(value)
    return args, call[-1] if isinstance(call[-1], dict) else {}


def check(
    op: Any, values: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh = MESH
) -> bool:
    """Whether a run on few elements shows the outputs of a call.

    Then they are those of the meta kernel.
    """

    def spec(value: Any) -> Any:
        return Spec(mesh, [Replicate()], *value) if isinstance(value, TensorMeta) else value

    args, named = (
        [spec(value) for value in values],
        {name: spec(value) for name, value in kwargs.items()},
    )
    specs = [value for value in (*args, *named.values()) if isinstance(value, Spec)]
    rule = rule_of(op, DEFAULT)
    assert rule is not None
    shown = outputs_by_probe(op, rule, args, named, specs)
    if shown is None:
        return False
    try:
        expected = outputs_by_meta_kernel(op, args, named, specs)
    except (ShoalTensorError, RuntimeError, IndexError) as error:
        raise AssertionError(
            f"{op} of {args} {named} has outputs {shown.metas}, but fails"
        ) from error
    assert shown.metas == expected.metas, (op, args, named)
    assert shown.binding() == expected.binding(), (op, args, named)
    return True


@pytest.mark.parametrize("mesh", [MESH, ACCELERATOR], ids=["cpu", "cuda"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}{call[1:]}")
def test_few_elements_show_what_each_shape_returns(call: tuple[Any, ...], mesh: DeviceMesh) -> None:
    rng, shown = Random(str(call)), 0
    for _ in range(32):
        sizes = dict(zip("abcd", rng.sample((2, 4, 6, 8, 12, 16), 4), strict=True))
        if rng.random() < 0.3:
            sizes["a"] = rng.choice((0, 1, 3, sizes["b"]))
        shown += check(call[0], *with_sizes(call, sizes), mesh)
    assert shown, "runs were of use"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_few_elements_show_what_each_shape_of_every_operator_returns() -> None:
    """Calls of torch's own samples, in other sizes: what is equal stays equal."""
    ops = frozenset(op for op, rule in TABLE.items() if rule.sizes is not None)
    rng, shown, count = Random(7), 0, 0
    for op, calls in recorded(ops, samples=6, per_op=6).items():
        for call in calls:
            values = [*call.args, *call.kwargs.values()]
            if any(
                isinstance(value, list | tuple) and any(map(torch.is_tensor, value))
                for value in values
            ):
                continue
            for _ in range(8):
                resized = _Resized(rng, TABLE[op].sizes or ())
                named = zip([a.name for a in op._schema.arguments], call.args, strict=False)
                args = [resized(name, value) for name, value in named]
                kwargs = {name: resized(name, value) for name, value in call.kwargs.items()}
                shown, count = shown + check(op, args, kwargs), count + 1
    assert shown > count / 2, (shown, count)


class _Resized:
    """Arguments of a recorded call with other sizes, the same for equal ones."""

    def __init__(self, rng: Random, size_arguments: Sequence[str]) -> None:
        self._names, self._sizes = size_arguments, {0: 0, 1: 1}
        self._fresh = iter(rng.sample((2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24), 11))

    def __call__(self, name: str, value: Any) -> Any:
        if name in self._names:
            return [self._of(n) for n in value]
        if not isinstance(value, torch.Tensor):
            return value
        shape = tuple(self._of(n) for n in value.shape)
        order = sorted(range(value.ndim), key=lambda d: (-value.stride()[d], -value.shape[d]))
        stride, step = [0] * value.ndim, 1
        for dim in reversed(order):
            stride[dim], step = step, step * max(shape[dim], 1)
        return TensorMeta(shape, tuple(stride), value.dtype)

    def _of(self, size: int) -> int:
        if size not in self._sizes:
            self._sizes[size] = next(self._fresh)
        return self._sizes[size]


def test_a_result_of_fixed_size_is_not_taken_for_a_size_of_the_inputs() -> None:
    """`view_as_real` has two numbers for each of its input; there may be a dim of two elements."""
    rule = rule_of(aten.relu.default, DEFAULT)
    assert rule is not None
    spec = Spec(MESH, [Replicate()], (2, 3), dtype=torch.complex64)
    assert outputs_by_probe(aten.view_as_real.default, rule, [spec], {}, [spec]) is None


def test_what_the_operator_refuses_is_refused_in_every_size() -> None:
    a, b = Spec(MESH, [Replicate()], (4, 6)), Spec(MESH, [Replicate()], (8, 2))
    decide(aten.mm.default, [a, Spec(MESH, [Replicate()], (6, 2))], {}, DEFAULT)
    with pytest.raises(OperatorArgumentError, match="same reduction dim"):
        decide(aten.mm.default, [a, b], {}, DEFAULT)


def test_tensors_with_gaps_are_shown_to_the_meta_kernel() -> None:
    rule = rule_of(aten.relu.default, DEFAULT)
    assert rule is not None
    for stride, shown in (((2, 1), True), ((3, 1), False)):
        spec = Spec(MESH, [Replicate()], (5, 2), stride)
        assert (outputs_by_probe(aten.relu.default, rule, [spec], {}, [spec]) is not None) == shown


def test_meta_kernels_are_asked_only_where_each_shape_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("a meta kernel was asked")

    monkeypatch.setattr("shoal_dtensor.dispatch.global_call.shapes_of", refuse)
    x = Spec(MESH, [Shard(0)], (40, 6))
    assert decide(aten.add.Tensor, [x, x], {}, DEFAULT).outputs == (x,)
    with pytest.raises(AssertionError, match="a meta kernel was asked"):
        decide(aten.slice.Tensor, [x, 0, 1, 20], {}, DEFAULT)


def test_kernels_are_shown_indices_that_are_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nll_loss_backward` writes behind the memory of one class where the target is class 1.

    It does so without a check.
    """
    global_call.run_probe.cache_clear()
    shown: list[tuple[Any, int, int]] = []

    def kernel(op: Any, build: Any) -> Any:
        tensors = [x for x in build(torch.device("cpu"))[0] if isinstance(x, Tensor)]
        sizes = [n for x in tensors if x.is_floating_point() for n in x.shape]
        shown.extend((op, int(x.max()), min(sizes)) for x in tensors if x.dtype is torch.int64)
        return results_of(op, build)

    monkeypatch.setattr(global_call, "results_of", kernel)
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        target = distribute_tensor(torch.zeros(3, dtype=torch.int64), mesh, [Shard(0)])
        for classes in (4, 1, 0):
            x = distribute_tensor(torch.randn(3, classes), mesh, [Shard(0)]).requires_grad_()
            loss: Any = F.nll_loss(x, target, reduction="none", ignore_index=0)
            loss.sum().backward()
    assert {op for op, *_ in shown} >= {
        torch.ops.aten.nll_loss_forward.default,
        torch.ops.aten.nll_loss_backward.default,
    }
    assert all(index < size for _, index, size in shown)
