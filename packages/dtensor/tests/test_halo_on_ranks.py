"""Covers: rules/exchange.py, rules/nn/windows.py, on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from operator_calls import recording
from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor
from shoal_dtensor.internal import spans
from shoal_dtensor.layout.dim_sharding import DimSharding
from shoal_dtensor.rules import OpCall, S
from shoal_dtensor.rules.all_rules import TABLE
from shoal_dtensor.rules.exchange import Windows
from shoal_dtensor.testing import validate
from shoal_dtensor.testing.validate import CallTrial
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks

aten = torch.ops.aten
CONVOLUTIONS = [
    (9, 3, 1, 1, 1),
    (8, 3, 2, 1, 1),
    (8, 3, 2, 0, 1),
    (10, 3, 1, 2, 2),
    (7, 2, 3, 0, 1),
    (6, 1, 2, 0, 1),
    (5, 5, 1, 2, 1),
    (9, 4, 3, 3, 2),
    (3, 2, 1, 3, 1),
]


def real(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions_of_sharded_rows(case: tuple[int, ...]) -> None:
    """(length, kernel, stride, padding, dilation), every sharding.

    There are empty shards and windows beyond the ends.
    """
    length, kernel, stride, padding, dilation = case
    x, weight, bias = real(2, 3, length), real(4, 3, kernel), real(4)
    rest = ([stride], [padding], [dilation], False, [0], 1)
    forward = validate(aten.convolution.default, x, weight, bias, *rest)
    assert not forward.wrong
    gradient = real(*aten.convolution.default(x, weight, bias, *rest).shape)
    back = validate(
        aten.convolution_backward.default, gradient, x, weight, [4], *rest, [True, True, True]
    )
    assert not back.wrong
    assert min(forward.checked, back.checked) > 89, "the spatial dim has rows"


def test_two_sharded_dims_and_groups() -> None:
    x, weight = real(2, 4, 7, 6), real(6, 2, 3, 3)
    rest = ([2, 1], [1, 1], [1, 1], False, [0, 0], 2)
    assert not validate(aten.convolution.default, x, weight, real(6), *rest, ways=(3,)).wrong
    gradient = real(*aten.convolution.default(x, weight, None, *rest).shape)
    arguments = (gradient, x, weight, [6], *rest, [True, True, False])
    assert not validate(aten.convolution_backward.default, *arguments, ways=(3,)).wrong


@pytest.mark.parametrize("wants_input", [True, False])
@pytest.mark.parametrize("placement", [Replicate(), Shard(1)])
def test_kernels_that_return_the_gradient_of_a_frozen_weight(
    placement: Replicate | Shard, wants_input: bool
) -> None:
    """OneDNN does for float32; its result was taken for the gradient of the bias."""
    x, weight, bias = real(4, 6, 8).float(), real(6, 6, 3).float(), real(6).float()
    rest = ([1], [1], [1], False, [0], 1)
    gradient = real(*aten.convolution.default(x, weight, bias, *rest).shape).float()
    mask = [wants_input, False, True]
    of_input, _, of_bias = aten.convolution_backward.default(gradient, x, weight, [6], *rest, mask)
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,))
        shards = [distribute_tensor(t, mesh, [placement]) for t in (gradient, x, weight)]
        results = aten.convolution_backward.default(*shards, [6], *rest, mask)
    assert results[1] is None
    assert torch.equal(results[2].to_local(), of_bias)
    assert (results[0] is None) == (not wants_input)
    assert not wants_input or torch.equal(results[0].to_local(), of_input)


# (kernel, stride, padding, dilation, ceil_mode)
POOLS = [
    (3, 2, 1, 1, False),
    (2, 2, 0, 1, False),
    (3, 1, 1, 2, False),
    (3, 2, 0, 1, True),
    (2, 3, 1, 1, True),
]


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_pooling_of_sharded_rows(case: tuple[Any, ...]) -> None:
    kernel, stride, padding, dilation, ceil = case
    x = real(2, 3, 9, 7)
    rest = ([kernel] * 2, [stride] * 2, [padding] * 2, [dilation] * 2, ceil)
    values, indices = aten.max_pool2d_with_indices.default(x, *rest)
    reports = [validate(aten.max_pool2d_with_indices.default, x, *rest)]
    back = aten.max_pool2d_with_indices_backward.default
    reports += [validate(back, real(*values.shape), x, *rest, indices)]
    checked = [report.checked for report in reports]
    if dilation == 1:
        for counted, divisor in ((True, None), (False, None), (True, 5)):
            more = ([kernel] * 2, [stride] * 2, [padding] * 2, ceil, counted, divisor)
            shape = aten.avg_pool2d.default(x, *more).shape
            reports += [validate(aten.avg_pool2d.default, x, *more)]
            reports += [validate(aten.avg_pool2d_backward.default, real(*shape), x, *more)]
    assert not [line for report in reports for line in report.wrong[:1]]
    assert min(checked) > 60, "the spatial dims have rows"


def test_pooling_of_volumes_and_of_one_row() -> None:
    x = real(1, 2, 5, 4, 6)
    rest = ([2], [2], [1], [1], False)
    values, indices = aten.max_pool3d_with_indices.default(x, *rest)
    back = aten.max_pool3d_with_indices_backward.default
    assert not validate(aten.max_pool3d_with_indices.default, x, *rest).wrong
    assert not validate(back, real(*values.shape), x, *rest, indices).wrong
    row = real(2, 1, 9)
    assert not validate(aten.max_pool2d_with_indices.default, row, [1, 3], [1, 2], [0, 1]).wrong


def calls_of(run: Any, *tensors: Any) -> list[tuple[Any, list[Any]]]:
    """The operators with windows that run forward and backward, with what they are given."""
    calls: list[tuple[Any, list[Any]]] = []

    def note(op: Any, args: Any, kwargs: Any) -> None:
        if any(word in str(op) for word in ("upsample", "adaptive", "convolution")):
            calls.append(
                (op, [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args])
            )

    with recording(note):
        result = run(*(t.clone().requires_grad_() for t in tensors))
        result.backward(real(*result.shape))
    return calls


def call_of(op: Any, args: Any) -> OpCall:
    return CallTrial(op, args, {}, TABLE[op]).call


MODES = [
    ("nearest", False),
    ("nearest-exact", False),
    ("bilinear", False),
    ("bicubic", False),
    ("bilinear", True),
    ("bicubic", True),
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "size", [{"scale_factor": (2, 3)}, {"size": (15, 7)}, {"scale_factor": (1, 1.5)}], ids=str
)
def test_enlargement_of_sharded_rows(mode: tuple[str, bool], size: dict[str, Any]) -> None:
    """Whole multiples have rows, by given factors and by sizes.

    The dim that is stretched otherwise has none.
    """
    name, smooth = mode
    calls = calls_of(
        lambda x: F.interpolate(x, mode=name, antialias=smooth, **size), real(2, 3, 5, 6)
    )
    assert len(calls) == 2
    for op, args in calls:
        report = validate(op, *args, pairs=size == {"scale_factor": (2, 3)})
        assert not report.wrong, report.wrong[:2]
        dims = [
            e.dim
            for row in TABLE[op].rows(call_of(op, args))
            for e in row.inputs
            if isinstance(e, S)
        ]
        assert dims == ([0, 1, 2, 3] if size == {"scale_factor": (2, 3)} else [0, 1, 2])


LINES_AND_VOLUMES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9), {"scale_factor": 4, "mode": "linear"}),
    ((1, 2, 5, 3, 4), {"scale_factor": 2, "mode": "trilinear"}),
    ((2, 3, 9), {"scale_factor": 2, "mode": "linear", "align_corners": True}),
]


@pytest.mark.parametrize("case", LINES_AND_VOLUMES, ids=str)
def test_enlargement_of_lines_and_volumes(case: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    shape, options = case
    for op, args in calls_of(lambda x: F.interpolate(x, **options), real(*shape)):
        assert not validate(op, *args, pairs=False).wrong


@pytest.mark.parametrize("size", [(3, 2), (1, 3), (9, 6), (4, 3)], ids=str)
def test_adaptive_pooling_of_sharded_rows(size: tuple[int, int]) -> None:
    """Windows of one length; where 9 rows make 4, the windows differ and rows stay whole."""
    for pool in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
        for op, args in calls_of(lambda x, pool=pool: pool(x, size), real(2, 3, 9, 6)):
            assert not validate(op, *args).wrong
            rows = TABLE[op].rows(call_of(op, args))
            assert any(S(2) in row.inputs for row in rows) == (size != (4, 3))


# (kernel, stride, padding, output_padding, dilation, groups)
TRANSPOSED = [
    (3, 2, 1, 1, 1, 1),
    (2, 2, 0, 0, 1, 1),
    (4, 2, 1, 0, 1, 1),
    (2, 3, 0, 1, 1, 1),
    (3, 2, 1, 1, 2, 2),
    (1, 2, 0, 0, 1, 1),
    (5, 1, 4, 0, 1, 2),
]


@pytest.mark.parametrize("length", [7, 4])
@pytest.mark.parametrize("case", TRANSPOSED, ids=str)
def test_transposed_convolutions_of_sharded_rows(case: tuple[int, ...], length: int) -> None:
    """With outputs that no input reaches, and shards without outputs.

    Windows overlap or leave gaps.
    """
    kernel, stride, padding, more, dilation, groups = case
    if length == 4 and kernel == 5:
        length = 6

    def run(x: Any, weight: Any, bias: Any) -> Any:
        return F.conv_transpose1d(x, weight, bias, stride, padding, more, groups, dilation)

    for op, args in calls_of(run, real(2, 4, length), real(4, 3, kernel), real(3 * groups)):
        report = validate(op, *args, pairs=length == 4)
        assert not report.wrong, report.wrong[:2]
        assert any(S(2) in row.inputs for row in TABLE[op].rows(call_of(op, args)))


def test_transposed_convolutions_of_two_sharded_dims() -> None:
    for op, args in calls_of(
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1),
        real(2, 2, 5, 4),
        real(2, 3, 3, 3),
        real(3),
    ):
        assert not validate(op, *args).wrong


SMALL = st.integers(1, 4)


@given(st.data(), st.booleans(), st.integers(1, 12), SMALL, SMALL, st.integers(0, 4), SMALL)
def test_shards_make_all_outputs_once_in_order_and_read_what_these_need(
    data: Any, transposed: bool, length: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    """Against the definition: a window of inputs per output.

    Transposed it is a window of outputs per input.
    """
    reach = dilation * (kernel - 1)
    made = (
        (length - 1) * stride - 2 * padding + reach + 1
        if transposed
        else (length + 2 * padding - reach - 1)
    )
    made = made if transposed else made // stride + 1
    if made <= 0:
        return
    windows = Windows(length, made, kernel, stride, padding, dilation, transposed)
    weights = data.draw(st.lists(st.integers(0, 5), min_size=4, max_size=4))
    total = sum(weights)
    stops = [length * sum(weights[: i + 1]) // total if total else length for i in range(4)]
    sizes = tuple(b - a for a, b in zip([0, *stops[:-1]], stops, strict=True))
    cut = windows(DimSharding((0,), (4,), sizes))
    assert cut.length == made
    assert min(cut.sizes) >= 0
    taps = [dilation * j - padding for j in range(kernel)]
    for start, stop in spans(cut.sizes):
        outputs = range(start, stop)
        if transposed:
            needed = [i for i in range(length) for tap in taps if i * stride + tap in outputs]
        else:
            needed = [o * stride + tap for o in outputs for tap in taps]
        first, last = windows.reads((start, stop))
        assert not needed or first <= min(needed) <= max(needed) < last
        assert not needed or transposed or (first, last) == (min(needed), max(needed) + 1)


@pytest.mark.parametrize(
    ("shape", "placements"), [((4,), [Shard(2)]), ((2, 2), [Shard(2), Shard(3)])], ids=str
)
@on_ranks(4)
def test_a_convolutional_network_exchanges_borders_only(
    shape: tuple[int, ...], placements: list[Any]
) -> None:
    mesh = init_device_mesh("cpu", shape)
    whole = [Replicate()] * len(shape)
    torch.manual_seed(0)
    weights = [real(8, 3, 3, 3), real(8, 8, 3, 3), real(4, 8, 1, 1)]

    def network(x: Any, kernels: list[Any]) -> Any:
        x = F.relu(F.conv2d(x, kernels[0], padding=1))
        x = F.max_pool2d(F.relu(F.conv2d(x, kernels[1], padding=1)), 3, 2, 1)
        return F.conv2d(x, kernels[2]).square().sum()

    # large enough that borders are cheaper than the whole
    image = real(1, 3, 130, 121)
    plain = [t.clone().requires_grad_() for t in (image, *weights)]
    network(plain[0], plain[1:]).backward()
    x: Any = distribute_tensor(image, mesh, placements).requires_grad_()
    spread: list[Any] = [distribute_tensor(w, mesh, whole).requires_grad_() for w in weights]
    with CommDebugMode() as counter:
        loss = network(x, spread)
    names = {str(op) for op in counter.get_comm_counts()}
    assert names
    assert all("all_to_all" in name for name in names), names
    loss.backward()
    for one, other in zip((x, *spread), plain, strict=True):
        assert isinstance(one.grad, DTensor)
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@on_ranks(4)
def test_channels_last_stays_channels_last() -> None:
    mesh = init_device_mesh("cpu", (4,))

    def features(x: Any, weight: Any) -> list[Any]:
        made = F.conv2d(x.contiguous(memory_format=torch.channels_last), weight, padding=1)
        return [made, made.permute(0, 2, 3, 1).view(2, -1), made.flatten(1)]

    images, kernels = real(2, 4, 6, 5), real(8, 4, 3, 3)
    expected = features(images, kernels)
    for cut in (Replicate(), Shard(0), Shard(1), Shard(2)):
        for spread in (Replicate(), Shard(0), Shard(1)):
            x, weight = (
                distribute_tensor(t, mesh, [p]) for t, p in ((images, cut), (kernels, spread))
            )
            for got, want in zip(features(x, weight), expected, strict=True):
                assert got.stride() == want.stride()
                torch.testing.assert_close(got.full_tensor(), want)
