"""Random numbers between styles, against one device.  Covers: random_layouts/."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal_data_parallel import replicate
from shoal_dtensor import Replicate, Shard, random_mode
from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import current_watch
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_spmd_types import P, PartitionSpec, R, S, V, assert_type
from shoal_tp_styles import (
    ColwiseParallel,
    HeadParallel,
    LayoutError,
    OwnParameters,
    PackedColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    unparallelize_module,
)
from small_models import assert_same_parameters

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.4),
    "inplace": lambda h: F.dropout(h * 2, 0.4, inplace=True),
    "torch": lambda h: torch.dropout(h, 0.4, True),
    "channels": lambda h: F.dropout1d(h, 0.4),
    "alpha": lambda h: F.alpha_dropout(h, 0.4, training=True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "noise": lambda h: h + torch.rand_like(h) * torch.randn_like(h),
    "fill": lambda h: h * torch.empty_like(h).bernoulli_(0.3),
    "made like": lambda h: h * h.new_empty(h.shape).bernoulli_(0.3),
    "detached": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "gumbel": lambda h: F.gumbel_softmax(h.reshape(*h.shape[:2], -1, 2), dim=-1).flatten(-2),
    "transposed": lambda h: F.dropout(h.transpose(1, 2), 0.4).transpose(1, 2),
    "heads": lambda h: (
        F.dropout(h.view(*h.shape[:2], -1, 2).transpose(1, 2), 0.4).transpose(1, 2).flatten(2)
    ),
    "module": nn.Dropout(0.4),
    "modules": nn.Sequential(nn.Dropout1d(0.3), nn.AlphaDropout(0.2), nn.RReLU()),
}


class DrawBetweenProjections(nn.Module):
    """Two projections, and something that draws between them."""

    def __init__(self, draw: Callable[[Tensor], Tensor], hidden: int = 12) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(6, hidden), nn.Linear(hidden, 6), draw

    def forward(self, x: Tensor) -> Any:
        return self.down(self.draw(self.up(x)))


def compare(model: nn.Module, plan: Any, x: Tensor) -> None:
    """Two training steps' outputs, gradients and generators are those of one device."""
    parallel = parallelize_module(copy.deepcopy(model), all_ranks(), plan)
    for _ in range(2):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.manual_seed(3)
        expected = model(a)
        expected.square().sum().backward()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        out = parallel(b)
        out.square().sum().backward()
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(b.grad, a.grad)
        assert torch.equal(torch.get_rng_state(), state)
    assert_same_parameters(parallel, model)


@on_ranks(4)
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("hidden", [16, 8, 10])
def test_draws_between_styles_are_those_of_one_device(kind: str, hidden: int) -> None:
    model = DrawBetweenProjections(DRAWS[kind], hidden).double()
    compare(
        model,
        {"up": ColwiseParallel().aligned(2), "down": RowwiseParallel().aligned(2)},
        torch.randn(3, 5, 6).double(),
    )


class RecurrentWithDropout(nn.Module):
    """A recurrent module, and dropout behind it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner, self.drop = nn.GRU(6, 8, **options), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.inner(x)[0])


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 4, 12, dropout=0.3, **options)


@dataclass(frozen=True)
class OtherOrder:
    """A module that computes in memory that is not in the order of the dims.

    Attributes:
        make: the module.
        plan: its plan.
        shape: of its input.
        memory_format: of its input.
    """

    make: Callable[[], nn.Module]
    plan: Any
    shape: tuple[int, ...]
    memory_format: torch.memory_format = torch.contiguous_format


def two_convolutions_with_dropout() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 1), nn.Dropout(0.4), nn.Conv2d(8, 4, 1), nn.Dropout(0.4))


GATHERED = ColwiseParallel(output_layouts=Replicate())
ENCODER: Any = {
    "self_attn": HeadParallel(),
    "linear1": ColwiseParallel(),
    "linear2": RowwiseParallel(),
}
IN_OTHER_ORDER: dict[str, OtherOrder] = {
    **{
        f"encoder, {batch_first=}, {rows} rows": OtherOrder(
            partial(encoder, batch_first=batch_first), ENCODER, (rows, 5, 8)
        )
        for batch_first in (False, True)
        for rows in (1, 3)
    },
    **{
        f"recurrent, {bidirectional=}": OtherOrder(
            partial(RecurrentWithDropout, batch_first=True, bidirectional=bidirectional),
            {"inner": GATHERED},
            (3, 4, 6),
        )
        for bidirectional in (False, True)
    },
    "channels last": OtherOrder(
        two_convolutions_with_dropout,
        {"0": GATHERED, "2": RowwiseParallel(input_layouts=Replicate())},
        (2, 4, 3, 3),
        torch.channels_last,
    ),
}


@on_ranks(4)
@pytest.mark.parametrize("kind", IN_OTHER_ORDER)
def test_draws_fill_memory_in_the_order_of_one_device(kind: str) -> None:
    case = IN_OTHER_ORDER[kind]
    module = case.make().double()
    x = torch.randn(case.shape).contiguous(memory_format=case.memory_format)
    compare(module, case.plan, x.double())


class DropoutBehindAttention(nn.Module):
    """Attention, and dropout of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return F.dropout(self.inner(x, x, x)[0], 0.4)


@on_ranks(4)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_draws_into_shards_of_what_is_in_another_order(dim: int) -> None:
    model, x = DropoutBehindAttention().double(), torch.randn(4, 8, 8).double()
    parallel = parallelize_module(
        copy.deepcopy(model), all_ranks(), {"inner": HeadParallel(output_layouts=Shard(dim))}
    )
    found = []
    for one in (model, parallel):
        torch.manual_seed(3)
        found.append(one(x))
    torch.testing.assert_close(found[1], found[0].chunk(4, dim)[all_ranks().get_local_rank()])


@on_ranks(4)
def test_draws_where_each_rank_has_one_row() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = encoder(batch_first=True).double()
    # it would draw on the axis of the heads alone
    model.self_attn.dropout = 0.0
    x = torch.randn(2, 5, 8).double()
    parallel = parallelize_module(
        copy.deepcopy(model), mesh["tensor"], {"self_attn": HeadParallel()}
    )
    replicate(parallel, mesh["data"])
    row = mesh.get_local_rank("data")
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    torch.testing.assert_close(parallel(x[row : row + 1]), expected[row : row + 1])


class DroppingAttention(nn.Module):
    """Attention with dropout of its weights and of its output."""

    def __init__(self, heads: int, kv_heads: int, by: str) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(8, heads * 4, bias=False), nn.Linear(heads * 4, 8)
        self.k, self.v = nn.Linear(8, kv_heads * 4), nn.Linear(8, kv_heads * 4)
        self.by, self.drop = by, nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.by == "sdpa":
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            k, v = (z.repeat_interleave(q.shape[1] // k.shape[1], 1) for z in (k, v))
            mask = torch.ones(t, t, dtype=torch.bool).triu(1)
            y = (
                self.drop((q @ k.transpose(-1, -2) / 2).masked_fill(mask, -torch.inf).softmax(-1))
                @ v
            )
        return self.o(F.dropout(y.transpose(1, 2).reshape(b, t, -1), 0.1))


@on_ranks(4)
@pytest.mark.parametrize("heads", [(4, 4), (8, 4), (8, 8), (6, 6)])
@pytest.mark.parametrize("by", ["sdpa", "hand"])
def test_attention_drops_as_on_one_device(heads: tuple[int, int], by: str) -> None:
    model = DroppingAttention(*heads, by).double()
    query, key = heads
    columns = {"q": ColwiseParallel().heads(query, 4), "[kv]": ColwiseParallel().heads(key, 4)}
    plan = {**columns, "o": RowwiseParallel().heads(query, 4)}
    compare(model, plan, torch.randn(3, 5, 8).double())


class DroppingAttentionWithSinks(DroppingAttention):
    """Attention with a weight per head that the scores are compared with.

    A parameter holds them.
    """

    def __init__(self, heads: int) -> None:
        super().__init__(heads, heads, "hand")
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x: Tensor) -> Any:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, 1)
        scores = torch.cat([q @ k.transpose(-1, -2), sinks], -1).softmax(-1)
        y = F.dropout(scores[..., :-1], 0.3) @ v
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


@on_ranks(4)
@pytest.mark.parametrize("heads", [8, 4])
def test_shards_of_own_parameters_have_the_layout_of_the_parameter(heads: int) -> None:
    projections = {name: ColwiseParallel().heads(heads, 4) for name in "qkv"}
    plan = {
        **projections,
        "o": RowwiseParallel().heads(heads, 4),
        "": OwnParameters(dims={"sinks": 0}),
    }
    compare(DroppingAttentionWithSinks(heads).double(), plan, torch.randn(3, 5, 8).double())


class NormedHeads(nn.Module):
    """A projection to heads, a norm of each, and dropout; models name the norm's layout S(1)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q, self.norm = nn.Linear(6, heads * 4), nn.RMSNorm(4)
        self.o = nn.Linear(heads * 4, 6)

    def forward(self, x: Tensor) -> Any:
        q = F.dropout(self.norm(self.q(x).unflatten(-1, (-1, 4))), 0.4)
        # without a style: its layout follows from the dims
        return self.o(F.dropout(q.transpose(1, 2), 0.2).transpose(1, 2).flatten(2))


@on_ranks(4)
@pytest.mark.parametrize("heads", [8, 6])
def test_norms_of_heads_keep_the_shards_of_heads(heads: int) -> None:
    compare(
        NormedHeads(heads).double(),
        {
            "q": ColwiseParallel().heads(heads, 4),
            "norm": SequenceParallel(use_local_output=True),
            "o": RowwiseParallel().heads(heads, 4),
        },
        torch.randn(3, 5, 6).double(),
    )


class RecomputedBlock(nn.Module):
    """A block whose forward is run again in backward."""

    def __init__(self, block: Any, how: str) -> None:
        super().__init__()
        self.block: Any = block
        self.how = how

    def forward(self, x: Tensor) -> Any:
        reentrant = self.how.startswith("reentrant")
        if self.how.endswith("function"):
            return x + checkpoint(
                lambda y: self.block.down(F.dropout(self.block.up(y), 0.4)),
                x,
                use_reentrant=reentrant,
            )
        return x + checkpoint(self.block, x * 2, use_reentrant=reentrant)


@on_ranks(4)
@pytest.mark.parametrize("how", ["reentrant", "kept"])
def test_recomputation_draws_again_what_the_forward_drew(how: str) -> None:
    for draw in (DRAWS["dropout"], nn.Dropout(0.4)):
        model = RecomputedBlock(DrawBetweenProjections(draw), how).double()
        compare(
            model,
            {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()},
            torch.randn(3, 5, 6).double(),
        )


class DroppingStream(nn.Module):
    """A stream of activations that is sharded along the sequence, with dropout on it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.drop = (
            nn.LayerNorm(6),
            DrawBetweenProjections(DRAWS["dropout"]),
            nn.Dropout(0.3),
        )

    def forward(self, x: Tensor) -> Any:
        x = x + self.drop(self.inner(self.norm(x)))
        return self.drop(x)


SEQUENCE: dict[str, Any] = {
    "": PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(1),
        use_local_input=True,
        output_layouts=Shard(1),
        desired_output_layouts=Replicate(),
    ),
    "norm": SequenceParallel(),
    "inner.up": ColwiseParallel(input_layouts=Shard(1)),
    "inner.down": RowwiseParallel(output_layouts=Shard(1)),
}


@on_ranks(4)
def test_dropout_along_the_sequence() -> None:
    compare(DroppingStream().double(), SEQUENCE, torch.randn(3, 8, 6).double())


def batch(dim: int = 0) -> PrepareModuleInput:
    """The style that says that a plain input is this rank's shard of the batch."""
    return PrepareModuleInput(
        input_layouts=Shard(dim), desired_input_layouts=Shard(dim), use_local_output=True
    )


class Folded(nn.Module):
    """Rows and steps of a sequence in one dim; each rank along the sequence has several runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DrawBetweenProjections(DRAWS["dropout"])

    def forward(self, x: Tensor) -> Any:
        return self.inner(x.flatten(0, 1)).view(x.shape)


HEADS: Any = {"[qkv]": ColwiseParallel(), "o": RowwiseParallel()}
INNER: Any = {"inner.up": ColwiseParallel(), "inner.down": RowwiseParallel()}
# with the dim that the other axis shards
BATCHED: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "residual": (DroppingStream, INNER, 0),
    "folded": (Folded, INNER, 1),
    "attention": (lambda: DroppingAttention(4, 4, "sdpa"), HEADS, 0),
    "grouped": (lambda: DroppingAttention(4, 2, "hand"), HEADS, 0),
}


@on_ranks(4)
@pytest.mark.parametrize("kind", BATCHED)
def test_dropout_over_the_shards_of_a_batch(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    make, plan, dim = BATCHED[kind]
    single = make().double()
    parallel = parallelize_module(copy.deepcopy(single), mesh["tensor"], plan)
    parallelize_module(parallel, mesh["data"], batch(dim))
    x = torch.randn(4, 6, 8 if isinstance(single, DroppingAttention) else 6).double()
    own = mesh.get_local_rank("data")
    torch.manual_seed(3)
    expected = single(x)
    torch.manual_seed(3)
    torch.testing.assert_close(parallel(x.chunk(2, dim)[own]), expected.chunk(2, dim)[own])


class DrawBehindProjection(nn.Module):
    """Part of a fused projection, of its features, or noise of explicit sizes."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.draw = nn.Linear(6, 16), draw

    def forward(self, x: Tensor) -> Any:
        return self.draw(self.up(x))


UNKNOWN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "part": (lambda h: F.dropout(h[..., :2], 0.4), "takes a part of a sharded dim"),
    "sizes": (lambda h: F.dropout(h.view(*h.shape[:2], 1, 4), 0.4), "write -1"),
    "noise": (lambda h: h + torch.rand(h.shape), "equal random numbers on all ranks"),
    "own sizes": (lambda h: h.new_empty(3, 5, 7).bernoulli_(0.4), "explicit sizes"),
    "summands": (lambda h: F.dropout(h @ h.transpose(1, 2), 0.4), "summands"),
    "passed by": (lambda h: F.dropout(torch.jit.script(_scripted)(h), 0.4), "not a torch function"),
}


def _scripted(h: Tensor) -> Tensor:
    return h * 2


@on_ranks(4)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_draws_of_unknown_layout_are_refused(kind: str) -> None:
    draw, message = UNKNOWN[kind]
    model = parallelize_module(DrawBehindProjection(draw), all_ranks(), {"up": ColwiseParallel()})
    with pytest.raises(LayoutError, match=message):
        model(torch.randn(3, 5, 6))
    with random_mode("local"):
        model(torch.randn(3, 5, 6))
    model.eval()
    model(torch.randn(3, 5, 6))


class NoiseIntoShards(nn.Module):
    """A projection of random numbers that have this rank's size, made without its layout."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.drop = nn.Dropout(0.1)
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        noise = self.drop(torch.randn(*self.up(x).shape))
        out: Tensor = self.down(input=noise) if self.by_name else self.down(noise)
        return out


# Numbers that were drawn as replicated were taken for shards, if they were passed by name.
@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
@on_ranks(2)
def test_replicated_draws_are_refused_as_shards(by_name: bool) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(NoiseIntoShards(by_name), all_ranks(), plan)
    with pytest.raises(LayoutError, match="drawn as if it were replicated"):
        model(torch.ones(2, 6))


def by_head(h: Tensor) -> Tensor:
    """The features of a projection by heads, with sizes that fit several layouts of one head."""
    return h.view(*h.shape[:2], h.shape[-1] // 4, 4)


@on_ranks(4)
@pytest.mark.parametrize("spec", [False, True])
def test_an_asserted_type_is_the_layout_of_a_draw(spec: bool) -> None:
    axis = all_ranks().comm(0)

    def draw(h: Tensor) -> Tensor:
        if spec:
            heads = assert_type(by_head(h), PartitionSpec(None, None, axis, None))
        else:
            heads = assert_type(by_head(h), {axis: S(2)})
        return F.dropout(heads, 0.4).flatten(2)

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    compare(DrawBetweenProjections(draw, 16).double(), plan, torch.randn(3, 5, 6).double())


@on_ranks(4)
def test_plain_tensors_of_local_sizes_are_shards_only_if_asserted() -> None:
    axis = all_ranks().comm(0)

    def scaled(h: Tensor) -> Tensor:
        return F.dropout(h * torch.ones(h.shape, dtype=h.dtype), 0.4)

    def asserted(h: Tensor) -> Tensor:
        ones = assert_type(torch.ones(h.shape, dtype=h.dtype), {axis: S(-1)})
        return F.dropout(h * ones, 0.4)

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    compare(DrawBetweenProjections(asserted, 16).double(), plan, torch.randn(3, 5, 6).double())
    model = parallelize_module(DrawBetweenProjections(scaled, 16), all_ranks(), plan)
    with pytest.raises(LayoutError, match=r"unknown: mul: .*assert_type"):
        model(torch.randn(3, 5, 6))


@on_ranks(4)
def test_asserted_types_that_do_not_fit_are_refused() -> None:
    axis = all_ranks().comm(0)
    cases: list[tuple[Callable[[Tensor], Tensor], type[Exception], str]] = [
        (
            lambda h: F.dropout(assert_type(h, {axis: S(0)})),
            SpmdTypeError,
            r"but S\(0\) is asserted",
        ),
        (lambda h: F.dropout(assert_type(h, {axis: R})), SpmdTypeError, "but R is asserted"),
        (lambda h: F.dropout(assert_type(by_head(h), {axis: P})), LayoutError, "to be P over"),
        (lambda h: F.dropout(assert_type(by_head(h), {axis: V})), LayoutError, "to be V over"),
    ]
    for draw, error, message in cases:
        model = parallelize_module(
            DrawBehindProjection(draw), all_ranks(), {"up": ColwiseParallel()}
        )
        with pytest.raises(error, match=message):
            model(torch.randn(3, 5, 6))


@on_ranks(4)
def test_a_type_is_asserted_over_all_axes_of_an_unknown_layout() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    types: dict[Any, Any] = {"tensor": S(2)}

    def draw(h: Tensor) -> Tensor:
        return F.dropout(assert_type(by_head(h), types), 0.4).flatten(2)

    single = DrawBetweenProjections(draw, 8).double()
    parallel = parallelize_module(
        copy.deepcopy(single),
        mesh["tensor"],
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
    )
    parallelize_module(parallel, mesh["data"], batch())
    x = torch.randn(4, 5, 6).double()
    own = mesh.get_local_rank("data")
    with pytest.raises(SpmdTypeError, match="leaves out data"):
        parallel(x.chunk(2)[own])
    types["data"] = S(0)
    torch.manual_seed(3)
    expected = single(x)
    torch.manual_seed(3)
    torch.testing.assert_close(parallel(x.chunk(2)[own]), expected.chunk(2)[own])


@on_ranks(2)
def test_checkpointed_functions_that_draw_are_refused() -> None:
    for how in ("reentrant function", "kept function"):
        model = RecomputedBlock(DrawBetweenProjections(DRAWS["dropout"]), how)
        plan = {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
        parallel = parallelize_module(model, all_ranks(), plan)
        with pytest.raises(LayoutError, match="checkpoint"):
            parallel(torch.randn(3, 5, 6).requires_grad_())


class DroppingGate(nn.Module):
    """A gated projection whose two blocks drop on their own.

    Dropout without a style beside them is run again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 20), nn.Linear(10, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        gate, up = self.up(x).chunk(2, -1)
        y = self.down(F.dropout(gate.sigmoid(), 0.2) * self.drop(up))
        return checkpoint(self.drop, y, use_reentrant=False)


@on_ranks(4)
def test_blocks_of_a_fused_projection_drop_as_on_one_device() -> None:
    plan = {"up": PackedColwiseParallel(blocks=2), "down": RowwiseParallel()}
    compare(DroppingGate().double(), plan, torch.randn(3, 5, 6).double())


@on_ranks(2)
def test_modules_that_do_not_draw_are_not_watched() -> None:
    class Quiet(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.up, self.dropout = nn.Linear(6, 8), nn.Dropout(p)

        def forward(self, x: Tensor) -> Any:
            seen.append(current_watch())
            return self.dropout(torch.relu(F.gelu(self.up(x))))

    seen: list[object] = []
    for p, training in ((0.0, True), (0.5, False), (0.5, True)):
        model = parallelize_module(Quiet(p), all_ranks(), {"up": ColwiseParallel()}).train(training)
        model(torch.randn(3, 6))
    assert [watch is not None for watch in seen] == [False, False, True]
    plain = parallelize_module(
        nn.Sequential(nn.Linear(6, 8)), all_ranks(), {"0": ColwiseParallel()}
    )
    assert "forward" not in vars(plain), "nothing in it can draw"
    copied = copy.deepcopy(model)
    copied(torch.randn(3, 6))
    unparallelize_module(copied)
    assert "forward" not in vars(copied) and seen[-1] is not None
