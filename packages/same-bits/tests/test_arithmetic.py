"""Training gives the same bits on any mesh, and modules for which that is impossible are refused.

Covers: arithmetic.py, _torch.py, invariant/.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_of_blocks import GATHERED_PLAN, build_llama, needs_transformers
from shoal_data_parallel import MixedPrecisionPolicy, fully_shard, replicate
from shoal_dtensor import Replicate, Shard, clip_grad_norm_, full_tensor
from shoal_dtensor.internal import current_arithmetic
from shoal_mesh import CommDebugMode, DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks
from shoal_same_bits import invariant_arithmetic
from shoal_same_bits.invariant.blocks import Measured
from shoal_tp_styles import (
    ColwiseParallel,
    LoRA,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    StyleError,
    TiedWeightError,
    UnsupportedModuleError,
    loss_parallel,
    parallelize_module,
    preview,
)
from shoal_tp_styles.internal import lowered_of

VOCAB, WIDTH, HEADS, SEQUENCE, BATCH = 32, 32, 8, 16, 8


class AttentionWithoutKeyBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias of keys changes no score: its gradient is rounding alone, which Adam would magnify.
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        out: Tensor = self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return out


class EveryInvariantLayer(nn.Module):
    """Every kind of layer that has an invariant form, with biases.

    A Linear and a norm are named by no plan.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.stem = (
            nn.Embedding(VOCAB, WIDTH, padding_idx=3),
            nn.Linear(WIDTH, WIDTH),
        )
        self.norm, self.attention, self.second = (
            nn.LayerNorm(WIDTH),
            AttentionWithoutKeyBias(),
            nn.RMSNorm(WIDTH),
        )
        self.up, self.drop, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Dropout(0.25),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(self.embedding(tokens))
        x = x + self.attention(self.norm(x))
        x = x + self.down(self.drop(F.gelu(self.up(self.second(x)))))
        return self.head(self.last(x))  # type: ignore[no-any-return]  # torch


def plan(sequence: bool) -> dict[str, ParallelStyle]:
    split = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "attention.[qkv]": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=split),
        "up": ColwiseParallel(input_layouts=split),
        "down": RowwiseParallel(output_layouts=split),
        "head": ColwiseParallel(
            input_layouts=split, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        styles |= {
            "norm": SequenceParallel(),
            "stem": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=split),
            "attention": PrepareModuleInput(input_layouts=split, desired_input_layouts=Replicate()),
            "second": SequenceParallel(use_local_output=True),
            "last": SequenceParallel(use_local_output=True),
        }
    return styles


def train(
    mesh: DeviceMesh, dtype: torch.dtype, *, sequence: bool, sharded: bool
) -> dict[str, Tensor]:
    """Losses, norms and weights of three steps."""
    torch.manual_seed(1)
    model = parallelize_module(EveryInvariantLayer().to(dtype), mesh["tensor"], plan(sequence))
    if sharded:
        for module in (model.attention, model):
            fully_shard(module, mesh["data"])
    else:
        replicate(model, mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: dict[str, Tensor] = {}
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=draw)
        tokens = tokens.chunk(mesh.size(0))[mesh.get_local_rank("data")]
        with loss_parallel():
            loss = F.cross_entropy(
                model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1
            )
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        seen[f"loss {step}"] = all_reduce(full_tensor(loss.detach()), (mesh, "data"), op="avg")
        seen[f"norm {step}"] = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return seen | {name: full_tensor(param.detach()) for name, param in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(4, timeout=300)
def test_training_has_the_same_bits_on_any_mesh(dtype: torch.dtype) -> None:
    names = ("data", "tensor")
    with invariant_arithmetic():
        alone = init_device_mesh("cpu", (4, 1, 1), mesh_dim_names=("copies", *names))[names]
        want = train(alone, dtype, sequence=False, sharded=False)
        for shape, (sequence, sharded) in zip(
            [(1, 4), (2, 2), (4, 1), (2, 2), (1, 4)],
            [*product([False, True], repeat=2), (True, False)],
            strict=True,
        ):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            got = train(mesh, dtype, sequence=sequence, sharded=sharded)
            differ = [name for name in want if not torch.equal(want[name], got[name])]
            assert differ == [], (shape, sequence, sharded)


@on_ranks(4)
def test_the_numbers_are_the_ordinary_ones() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    ordinary = train(mesh, torch.float64, sequence=True, sharded=True)
    with invariant_arithmetic():
        invariant = train(mesh, torch.float64, sequence=True, sharded=True)
    for name, value in ordinary.items():
        torch.testing.assert_close(invariant[name], value, atol=1e-9, rtol=1e-9)


@on_ranks(2)
def test_a_request_does_not_depend_on_its_neighbours() -> None:
    with invariant_arithmetic(), torch.no_grad():
        torch.manual_seed(1)
        model = parallelize_module(
            EveryInvariantLayer().eval(), init_device_mesh("cpu", (2,)), plan(sequence=False)
        )
        tokens = torch.randint(VOCAB, (5, 7))
        together = full_tensor(model(tokens))
        assert torch.equal(together[2:3], full_tensor(model(tokens[2:3])))


@needs_transformers
@on_ranks(4)
def test_generation_has_the_same_bits_on_any_mesh_and_in_any_batch() -> None:
    prompts = torch.randint(3, 64, (8, 11), generator=torch.Generator().manual_seed(1))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("copies", "tensor"))["tensor"]
    found: list[dict[str, Tensor]] = []
    for mesh in (alone, init_device_mesh("cpu", (4,))):
        with invariant_arithmetic():
            model = parallelize_module(build_llama(torch.float32), mesh, GATHERED_PLAN)
            found.append(
                written(model, "greedy", prompts)
                | written(model, "third", prompts[3:4])
                | written(model, "sampled", prompts, do_sample=True, top_k=20)
            )
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []
    for what in ("tokens", "logits"):
        assert torch.equal(found[1][f"{what}, third"], found[1][f"{what}, greedy"][3:4])


def written(
    model: Any, name: str, prompts: Tensor, do_sample: bool = False, **how: Any
) -> dict[str, Tensor]:
    """Tokens and logits of some steps."""
    torch.manual_seed(2)
    how |= {
        "max_new_tokens": 6,
        "output_logits": True,
        "return_dict_in_generate": True,
        "eos_token_id": None,
    }
    out = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=do_sample, **how
    )
    return {f"tokens, {name}": out.sequences, f"logits, {name}": torch.stack(out.logits, 1)}


@needs_transformers
@on_ranks(4)
def test_the_loss_of_labels_has_the_same_bits_with_and_without_a_plan() -> None:
    layer = "model.layers.*."
    plan: dict[str, Any] = {
        layer + "self_attn.[qkv]_proj": "colwise",
        layer + "self_attn.o_proj": "rowwise",
    }
    plan |= {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    # 32 predictions: no rounding
    tokens = torch.randint(3, 64, (8, 33), generator=torch.Generator().manual_seed(1))
    found: list[dict[str, Tensor]] = []
    names, shapes = ("copies", "data", "tensor"), [(4, 1, 1), (1, 2, 2)]
    for styles, shape in product([plan, None], shapes):
        with invariant_arithmetic(), loss_parallel():
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)["data", "tensor"]
            model: Any = parallelize_module(
                build_llama(torch.float32).train(), mesh["tensor"], styles
            )
            replicate(model, mesh["data"])
            own = tokens.chunk(shape[1])[mesh.get_local_rank("data")]
            loss = model(own, labels=own).loss
            loss.backward()
            found.append(
                {name: full_tensor(param.grad) for name, param in model.named_parameters()}
            )
            if styles:  # without shards it is torch's own sum
                found[-1]["loss"] = all_reduce(full_tensor(loss.detach()), (mesh, "data"), op="avg")
    for want, got in zip(found[::2], found[1::2], strict=True):
        assert [name for name in want if not torch.equal(want[name], got[name])] == []


def test_faster_forms_are_used_where_they_have_the_same_bits() -> None:
    calls: list[str] = []

    def sums(name: str, order: int) -> Any:
        def compute(blocks: int, x: Tensor) -> Tensor:
            calls.append(name)
            total: Tensor = reduce(torch.add, x if order > 0 else x.flip(0))
            return total

        return compute

    measured = Measured(sums("definition", 1), (sums("backwards", -1), sums("forwards", 1)))
    x = torch.randn(100, 7)
    assert torch.equal(measured(1, x), reduce(torch.add, x))
    assert calls == ["definition", "backwards", "forwards", "forwards"]
    measured(1, x)
    assert calls[4:] == ["forwards"]


@on_ranks(2)
def test_it_sends_what_the_ordinary_mode_sends() -> None:
    mesh = init_device_mesh("cpu", (2,))
    counts = []
    for mode in (nullcontext, invariant_arithmetic):
        with mode():
            model = parallelize_module(
                AttentionWithoutKeyBias(),
                mesh,
                {"[qkv]": ColwiseParallel(), "o": RowwiseParallel()},
            )
            x = torch.randn(2, 8, WIDTH, requires_grad=True) * 1
            with CommDebugMode() as counted:
                model(x).sum().backward()
            counts.append(counted.get_total_counts())
    assert counts == [2, 2]


@on_ranks(2)
def test_preview_declares_what_the_mode_sends() -> None:
    mesh, tokens = init_device_mesh("cpu", (2,)), torch.zeros(4, 8, dtype=torch.long)
    with invariant_arithmetic():
        model = EveryInvariantLayer()
        styles = plan(sequence=True)
        costs = preview(
            model, {name: styles[name] for name in styles if name != "stem"}, mesh, tokens
        )
        parallelize_module(model, mesh, styles)
        norms = [row for row in costs.rows if row.path in ("norm", "second", "last")]
        assert [[cost.nbytes for cost in row.backward] for row in norms] == [
            [4 * WIDTH * 4] * n for n in (2, 1, 2)
        ]
        x = torch.randn(4, 4, WIDTH, requires_grad=True)
        with CommDebugMode() as counted:
            full_tensor(model.last(x)).sum().backward()
        assert counted.get_comm_counts()[torch.ops._c10d_functional.all_reduce] == 2


def form_of(module: nn.Module) -> str:
    return type(lowered_of(module)).__name__


def test_forms_follow_the_mode() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        with invariant_arithmetic(4) as entered:
            assert current_arithmetic() is entered
            model = parallelize_module(EveryInvariantLayer(), mesh, plan(sequence=True))
            forms = {name: form_of(m) for name, m in model.named_modules() if "forward" in vars(m)}
            assert forms["up"] == "InvariantColumn"
            assert forms["second"] == "InvariantTokenwise"
            assert forms["embedding"] == "InvariantRowEmbedding"
            late = parallelize_module(
                nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh, {"0": ColwiseParallel()}
            )
            assert form_of(late[1]) == "InvariantWhole"
            parallelize_module(late, mesh, {"1": RowwiseParallel()})
            assert form_of(late[1]) == "InvariantRow"
            for over_data in (replicate, fully_shard):
                plain: Any = over_data(nn.Sequential(nn.Linear(8, 8)), mesh)
                assert form_of(plain[0]) == "InvariantWhole"
        assert current_arithmetic() is None
        outside = parallelize_module(EveryInvariantLayer(), mesh, plan(sequence=True))
        assert form_of(outside.up) == "ColumnLinear"
        with pytest.raises(StyleError, match="inside it"):
            model(torch.zeros(2, 8, dtype=torch.long))


@pytest.mark.parametrize(
    ("module", "style", "named"),
    [
        (nn.Linear(8, 8), LoRA(base=ColwiseParallel(), rank=2), "LoRA"),
        (nn.Sequential(nn.BatchNorm1d(8)), {}, "'0' .BatchNorm1d."),
        (nn.Sequential(nn.Conv1d(8, 8, 1)), {}, "'0' .Conv1d."),
    ],
)
def test_what_has_no_form_is_refused(module: nn.Module, style: Any, named: str) -> None:
    with fake_world(2), invariant_arithmetic():
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(UnsupportedModuleError, match=named):
            parallelize_module(module, mesh, style)


@pytest.mark.parametrize("over_data", [replicate, fully_shard])
def test_tied_weights_over_data_are_refused(over_data: Any) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
        model[1].weight = model[0].weight
        return model

    with fake_world(2), invariant_arithmetic():
        over_data(tied(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "data"))["data"])
        with pytest.raises(TiedWeightError, match=r"'0.weight' and '1.weight' are one parameter"):
            over_data(tied(), init_device_mesh("cpu", (2,)))


def test_sums_in_two_dtypes_are_refused() -> None:
    with fake_world(2), invariant_arithmetic():
        mesh, policy = (
            init_device_mesh("cpu", (2,)),
            MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        )
        with pytest.raises(StyleError, match=r"gradients in torch.bfloat16, .* in torch.float32"):
            fully_shard(nn.Linear(8, 8), mesh, mp_policy=policy)
        with pytest.raises(StyleError, match=r"gradients in torch.bfloat16, .* in torch.float32"):
            replicate(nn.Linear(8, 8, dtype=torch.bfloat16), mesh, reduce_dtype=torch.float32)
        plans: list[dict[str, ParallelStyle]] = [
            {"0": ColwiseParallel()},
            {"0": RowwiseParallel()},
            {},
        ]
        for styles in plans:
            model = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh, styles)
            with torch.autocast("cpu"), pytest.raises(StyleError, match="under autocast"):
                model(torch.ones(2, 8))


def test_ids_without_a_row_are_refused() -> None:
    with fake_world(2), invariant_arithmetic():
        mesh = init_device_mesh("cpu", (2,))
        plans: list[dict[str, ParallelStyle]] = [
            {"0": ColwiseParallel()},
            {"0": RowwiseParallel()},
            {},
        ]
        for styles in plans:
            model = parallelize_module(nn.Sequential(nn.Embedding(8, 8)), mesh, styles)
            for outside in (-1, 8):
                with pytest.raises(
                    IndexError, match=f"id {outside} is out of bounds for a table of 8 rows"
                ):
                    model(torch.tensor([[0, outside]]))


def test_sizes_and_blocks_that_do_not_fit_are_refused() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        with invariant_arithmetic(8), pytest.raises(StyleError, match="12 elements over 4 ranks"):
            parallelize_module(nn.Linear(8, 12), mesh, ColwiseParallel())
        with (
            invariant_arithmetic(2),
            pytest.raises(StyleError, match="the number of ranks must divide"),
        ):
            parallelize_module(nn.Linear(8, 16), mesh, RowwiseParallel())
        with (
            invariant_arithmetic(2),
            pytest.raises(StyleError, match=r"blocks=2"),
            invariant_arithmetic(4),
        ):
            pass
        with pytest.raises(StyleError, match="power of two"), invariant_arithmetic(3):
            pass
