"""Covers: plan/parallelize.py, plan/explain_errors.py, styles/linear.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shoal_tp_styles
from one_device import as_one_device
from shoal_context_parallel import context_parallel_attention
from shoal_dtensor import Replicate, Shard
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    HeadParallel,
    LayoutError,
    ParallelStyle,
    PlanError,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    TiedWeightError,
    parallelize_module,
    preview,
    unparallelize_module,
)
from small_models import MLP, ModelArgs, StackedMLP, Transformer, own_shard, transformer_plan
from tp_checks import assert_same_gradients

MESH = abstract_mesh((4,), ("tp",))
PREPARE = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())


@on_ranks(4)
@pytest.mark.parametrize("make", [MLP, StackedMLP])
@pytest.mark.parametrize("lower", [True, False])
def test_mlps(make: Any, lower: bool) -> None:
    single: Any = make().double()
    as_one_device(
        single, single.plan, all_ranks(), [torch.randn(6, 10, dtype=torch.double)], lower=lower
    )


@on_ranks(2)
def test_second_derivatives_need_a_model_that_is_not_lowered() -> None:
    # `lower=False` that was ignored gave the same values, so only a message showed it.
    x = torch.randn(3, 10, dtype=torch.double)

    def second_derivative(model: Any) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        return second

    expected = second_derivative(MLP().double())
    as_dtensors = parallelize_module(MLP().double(), all_ranks(), MLP.plan, lower=False)
    torch.testing.assert_close(second_derivative(as_dtensors), expected)
    lowered = parallelize_module(MLP().double(), all_ranks(), MLP.plan)
    with pytest.raises(RuntimeError, match="lower=False"):
        second_derivative(lowered)


@on_ranks(4)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_transformer(sequence: bool, checkpointed: bool, tied: bool) -> None:
    args = ModelArgs(
        dropout_p=0.0, vocab_size=10, weight_tying=tied, checkpoint_activations=checkpointed
    )
    single: Any = Transformer(args).double()
    module: Any = copy.deepcopy(single)
    parallelize_module(module, all_ranks(), transformer_plan(sequence))
    assert (module.output.weight is module.tok_embeddings.weight) is tied
    as_one_device(single, transformer_plan(sequence), all_ranks(), [torch.randint(10, (3, 8))])


class TiedEmbedding(nn.Module):
    """A head that holds the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(tokens).tanh())
        return out


ROWS, COLUMNS = (
    RowwiseParallel(input_layouts=Replicate()),
    ColwiseParallel(output_layouts=Replicate()),
)


@on_ranks(4)
@pytest.mark.parametrize(
    "plan",
    [{"table": ROWS}, {"head": COLUMNS}, {"table": ColwiseParallel(output_layouts=Replicate())}],
)
@pytest.mark.parametrize("lower", [True, False])
def test_a_plan_that_names_one_of_two_tied_modules(
    plan: dict[str, ParallelStyle], lower: bool
) -> None:
    single = TiedEmbedding().double()
    module = parallelize_module(copy.deepcopy(single), all_ranks(), plan, lower=lower)
    assert module.head.weight is module.table.weight
    tokens = torch.randint(10, (3, 8))
    as_one_device(single, plan, all_ranks(), [tokens], lower=lower)
    torch.testing.assert_close(unparallelize_module(module)(tokens), single(tokens))


@on_ranks(4)
def test_tied_modules_in_two_calls_and_tied_again() -> None:
    """As torch's own example does; the second call's style takes the place of the implied one."""
    single = TiedEmbedding().double()
    module = parallelize_module(copy.deepcopy(single), all_ranks(), {"table": ROWS})
    parallelize_module(module, all_ranks(), {"head": ColwiseParallel()})
    module.head.weight = module.table.weight
    tokens = torch.randint(10, (3, 8))
    expected, got = single(tokens), module(tokens)
    torch.testing.assert_close(got, own_shard(expected, 2))
    seed = torch.randn_like(expected)
    expected.backward(seed)
    got.backward(own_shard(seed, 2))
    assert_same_gradients(module, single)
    with pytest.raises(RuntimeError, match="already has the style ColwiseParallel"):
        parallelize_module(module, all_ranks(), {"head": ColwiseParallel()})
    other = parallelize_module(copy.deepcopy(single), all_ranks(), {"table": ROWS})
    with pytest.raises(TiedWeightError, match="it is shared and already"):
        parallelize_module(other, all_ranks(), {"head": RowwiseParallel()})


def test_no_mesh_is_an_error_and_no_plan_a_warning() -> None:
    with pytest.raises(LayoutError, match=r"pass device_mesh"):
        parallelize_module(MLP(), None, {"net1": ColwiseParallel()})
    with pytest.warns(UserWarning, match=r"no plan"):
        parallelize_module(MLP(), MESH)


class OwnStyle(ParallelStyle):
    """A style without a declaration."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


AGAIN: dict[str, tuple[Any, Any, str]] = {
    "all of it": (MLP.plan, MLP.plan, r"ColwiseParallel on module 'net1' \(Linear\)"),
    "a part": (MLP.plan, {"net2": RowwiseParallel()}, "RowwiseParallel on module 'net2'"),
    "another style": (
        MLP.plan,
        {"relu": SequenceParallel(), "net2": "colwise"},
        "already has the style RowwiseParallel",
    ),
    "a boundary": ({"net1": PREPARE}, {"net1": PREPARE}, "PrepareModuleInput on module 'net1'"),
    "an undeclared style": (
        {"net1": OwnStyle()},
        {"net1": OwnStyle()},
        "OwnStyle on module 'net1'",
    ),
}


@pytest.mark.parametrize("name", AGAIN)
@fake_world(2)
def test_a_plan_applied_twice_is_refused_before_anything_changes(name: str) -> None:
    plan, again, message = AGAIN[name]
    mesh = init_device_mesh("cpu", (2,))
    module: Any = parallelize_module(MLP(), mesh, plan)
    before = {
        path: (id(each), each.__dict__.get("forward")) for path, each in module.named_modules()
    }
    params = [id(param) for param in module.parameters()]
    with pytest.raises(PlanError, match=f"(?s){message}.*unparallelize_module"):
        parallelize_module(module, mesh, again)
    assert {
        path: (id(each), each.__dict__.get("forward")) for path, each in module.named_modules()
    } == before
    assert [id(param) for param in module.parameters()] == params
    parallelize_module(unparallelize_module(module), mesh, again)


@pytest.mark.parametrize(
    "name", ["_pre_dp_module_transform", "_HeadTailLoadBalancer", "DTensorExtensions"]
)
def test_a_name_of_torchs_that_is_not_here_says_what_is(name: str) -> None:
    with pytest.raises(ImportError, match=f"no {name}: .*(replicate|context_parallel|fully_shard)"):
        # as `from shoal_tp_styles import name`
        __import__(shoal_tp_styles.__name__, fromlist=[name])
    assert not hasattr(shoal_tp_styles, name)


@fake_world(2)
def test_a_style_applied_by_hand_twice_is_refused() -> None:
    mesh, module = init_device_mesh("cpu", (2,)), nn.Linear(4, 4)
    ColwiseParallel()._apply(module, mesh)
    with pytest.raises(PlanError, match="already has the style ColwiseParallel"):
        RowwiseParallel()._apply(module, mesh)


@on_ranks(4)
def test_the_rest_of_a_model_is_made_parallel_later() -> None:
    single: Any = MLP().double()
    module: Any = copy.deepcopy(single)
    for path, style in MLP.plan.items():
        parallelize_module(module, all_ranks(), {path: style})
    x = torch.ones(3, 10, dtype=torch.double)
    torch.testing.assert_close(module(x), single(x))


@on_ranks(2)
def test_a_shared_module_is_made_parallel_under_one_of_its_names() -> None:
    single: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    single.head = single[0]
    module: Any = copy.deepcopy(single)
    parallelize_module(
        module, init_device_mesh("cpu", (2,)), {"head": ColwiseParallel(output_layouts=Replicate())}
    )
    x = torch.randn(3, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(x), single(x))
    assert module.head is module[0]


def test_a_module_of_a_wrong_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"module is an nn\.Module, got str"):
        wrong: Any = "model"
        parallelize_module(wrong, abstract_mesh((2,)), {"up": "colwise"})


X = torch.zeros(1, 2, 4, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh: parallelize_module(nn.Linear(3, 4), mesh, "colwise"),
        lambda mesh: preview(nn.Linear(3, 4), ColwiseParallel(), mesh, X),
        lambda mesh: context_parallel_attention(X, X, X, mesh),
    ],
    ids=["parallelize_module", "preview", "context_parallel_attention"],
)
def test_what_is_no_mesh_is_refused_with_the_conversion(call: Any) -> None:
    with pytest.raises(
        LayoutError, match=r"device_mesh is builtins.str; make one .*interop.mesh_from_torch"
    ):
        call("tp")


ENCODER_PLANS: list[dict[str, Any]] = [
    {"self_attn": HeadParallel(), "linear1": ColwiseParallel(), "linear2": RowwiseParallel()},
    {"self_attn": HeadParallel()},
    {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()},
]


@on_ranks(4)
@pytest.mark.parametrize("plan", ENCODER_PLANS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_fused_encoder_layers_call_modules_with_styles(
    plan: dict[str, Any], norm_first: bool
) -> None:
    options: Any = {"batch_first": True, "norm_first": norm_first}
    layer: Any = nn.TransformerEncoderLayer(16, 8, 32, **options).double().eval()
    encoder: Any = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x, padding = torch.randn(4, 6, 16, dtype=torch.double), torch.zeros(4, 6, dtype=torch.bool)
    padding[0, -2:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.double)
    for single, where, mask in ((layer, "", "src_mask"), (encoder, "layers.*.", "mask")):
        module = copy.deepcopy(single)
        parallelize_module(
            module, all_ranks(), {where + name: style for name, style in plan.items()}
        )
        with torch.no_grad():
            for how in ({}, {"src_key_padding_mask": padding}, {mask: causal, "is_causal": True}):
                kept = ~padding if "src_key_padding_mask" in how else ...
                torch.testing.assert_close(module(x, **how)[kept], single(x, **how)[kept])
        for again in (copy.deepcopy(module), unparallelize_module(module)):
            names = ("activation_relu_or_gelu", "use_nested_tensor")
            held = [
                [vars(one).get(name) for one in tree.modules() for name in names]
                for tree in (again, single)
            ]
            assert (held[0] == held[1]) is (again is module), (
                "what torch asks is as it was where no style is left"
            )


class Split(nn.Module):
    """A fused projection, split by the sizes of one device, and 3 heads."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails
        self.qkv, self.q = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "split":
            x, _, _ = self.qkv(x).split(12, dim=2)
        if self.fails == "assert":
            assert self.q(x).shape == x.shape, "the shape of x"
        if self.fails == "other":
            raise KeyError("nothing of shapes")
        out: torch.Tensor = self.q(x).view(*x.shape[:-1], -1, 4)
        return out


@on_ranks(2)
@pytest.mark.parametrize(
    ("fails", "error", "text", "named"),
    [
        (
            "split",
            ValueError,
            "values to unpack",
            "qkv (Linear, ColwiseParallel): weight (36, 12), on this rank (18, 12); output S(-1)",
        ),
        (
            "heads",
            RuntimeError,
            "is invalid for input of size",
            "q (Linear, ColwiseParallel): weight (12, 12), on this rank (6, 12); output S(-1)",
        ),
        (
            "assert",
            AssertionError,
            "the shape of x",
            "modules of Split return only this rank's part",
        ),
        (
            "norm",
            RuntimeError,
            "normalized_shape",
            "0 (Linear, ColwiseParallel): weight (8, 12), on this rank (4, 12)",
        ),
        ("other", KeyError, "nothing of shapes", ""),
    ],
)
def test_errors_that_local_tensors_may_cause_have_a_note(
    fails: str, error: Any, text: str, named: str
) -> None:
    block: Any = (
        nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8)) if fails == "norm" else Split(fails)
    )
    module: Any = nn.Sequential(block, nn.ReLU())
    plan: Any = {"0.0" if fails == "norm" else "0.*": ColwiseParallel()}
    for _ in range(2):
        parallelize_module(module, all_ranks(), plan)
        copied = copy.deepcopy(module)
        for one in (module, copied):
            with pytest.raises(error, match=text) as caught:
                one(torch.randn(2, 4, 12))
            notes = getattr(caught.value, "__notes__", [])
            assert len(notes) == bool(named)
            ways_out = ("output_layouts=Replicate()", "hf.parallelize_adapters(model)")
            assert not named or all(words in notes[0] for words in (named, *ways_out))
        unparallelize_module(module)
        assert not module._forward_hooks
