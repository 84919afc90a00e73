"""Styles as values, and styles of a user's own.  Covers: styles/style.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shoal_dtensor
import shoal_tp_styles as styles
from one_device import as_one_device
from shoal_dtensor import Partial, Replicate, Shard
from shoal_dtensor.errors import LayoutTypeError
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    DeclaredStyle,
    HeadParallel,
    LayoutError,
    LoRA,
    ModuleSharding,
    OwnParameters,
    PackedColwiseParallel,
    ParallelStyle,
    Port,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    StyleError,
    UnsupportedModuleError,
    parallelize_module,
    preview,
    verify,
)


class GatedMLP(nn.Module):
    """A module without any style: three matrices of its own."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (
            nn.Parameter(torch.randn(hidden, dim)),
            nn.Parameter(torch.randn(hidden, dim)),
        )
        self.down = nn.Parameter(torch.randn(dim, hidden))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(functional.linear(x, self.gate)) * functional.linear(x, self.up)
        return functional.linear(hidden, self.down)


class GatedParallel(DeclaredStyle):
    """Hidden features are sharded, as docs/how-to/write-a-style.md says."""

    def sharding(self, module: nn.Module) -> ModuleSharding:
        return ModuleSharding(
            "GatedParallel",
            {"gate": Shard(0), "up": Shard(0), "down": Shard(1)},
            inputs=(Port(Replicate(), Replicate()),),
            outputs=(Port(Partial(), Replicate()),),
        )


@pytest.mark.parametrize("hidden", [12, 6, 3])
@on_ranks(4)
def test_a_style_of_a_users_own_trains_like_one_device(hidden: int) -> None:
    x = torch.randn(2, 5, dtype=torch.double)
    as_one_device(GatedMLP(5, hidden).double(), GatedParallel(), all_ranks(), [x])


def test_a_style_of_a_users_own_is_verified_and_previewed() -> None:
    mesh, module = abstract_mesh((4,)), GatedMLP(8, 12)
    assert verify(module, GatedParallel(), mesh).ok
    costs = preview(module, GatedParallel(), mesh, torch.zeros(2, 8))
    assert costs.count("all_reduce") == (1, 0) and costs.parameter_bytes == 3 * 8 * 12 * 4 // 4
    assert "operators by dispatch" in repr(costs)
    assert "<td>GatedParallel()" in costs._repr_html_()


def test_styles_are_values() -> None:
    style = ColwiseParallel(output_layouts=Replicate())
    same = ColwiseParallel(output_layouts=Replicate())
    assert style == same != ColwiseParallel() and hash(style) == hash(same)
    assert style.on("tp") != style and style.on("tp").axis == "tp" and style.axis is None
    assert style.aligned(8).multiple_of == 8 and style.multiple_of == 1
    with pytest.raises(LayoutError, match="positive number"):
        style.aligned(0)


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(input_layouts=Shard(1)).overlapped(2).on("tp"),
        ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        .heads(2, 64)
        .on(("dp", "tp")),
        RowwiseParallel().aligned(8).on(1),
        PackedColwiseParallel(blocks=3),
        SequenceParallel(sequence_dim=0),
        PrepareModuleInput(
            input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
        ),
        OwnParameters(dims={"sinks": 0}),
        OwnParameters(counts=("heads",)),
        LoRA(base=ColwiseParallel().aligned(4)),
    ],
)
def test_the_text_of_a_style_is_python_that_makes_it(style: DeclaredStyle) -> None:
    assert (
        eval(
            repr(style),
            {**vars(shoal_dtensor), **{name: getattr(styles, name) for name in styles.__all__}},
        )
        == style
    )


def test_the_text_of_a_style_leaves_out_what_is_not_given() -> None:
    @dataclasses.dataclass(unsafe_hash=True, kw_only=True, repr=False)
    class Mine(DeclaredStyle):
        scales: dict[str, int] = dataclasses.field(default_factory=dict)
        steps: int = dataclasses.field(default=0, init=False)

        def sharding(self, module: nn.Module) -> ModuleSharding:
            return ModuleSharding("Mine", {})

    mine = Mine()
    assert repr(mine) == "Mine()"
    mine.steps = 3
    assert repr(mine.aligned(2)) == "Mine(steps=3).aligned(2)"


STYLES = [
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    HeadParallel,
]
HOOKS = [
    *(
        "_partition_embedding_fn",
        "_partition_fn",
        "_partition_linear_fn",
        "_prepare_input_arg",
        "_prepare_input_fn",
    ),
    *("_prepare_input_kwarg_fn", "_prepare_out_fn", "_prepare_output_fn", "_replicate_module_fn"),
]


@pytest.mark.parametrize("base", STYLES)
@pytest.mark.parametrize("hook", HOOKS)
def test_extension_points_of_torch_are_refused_where_the_class_is_defined(
    base: Any, hook: str
) -> None:
    with pytest.raises(StyleError, match=rf"Mine overrides {hook}.*sharding\(module\)"):
        type("Mine", (base,), {hook: staticmethod(lambda *_: None)})


def test_extension_points_of_a_base_class_are_refused_too() -> None:
    class Mixin:
        @staticmethod
        def _prepare_input_fn(*_: Any) -> None:
            raise AssertionError("not reached")

    with pytest.raises(StyleError, match="_prepare_input_fn"):
        type("Mine", (Mixin, ColwiseParallel), {})


def test_a_style_with_its_own_apply_may_call_what_it_likes() -> None:
    class Mine(ColwiseParallel):
        def _prepare_input_fn(self) -> str:
            return "called"

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            module.prepared = self._prepare_input_fn()  # type: ignore[assignment]  # an attribute
            return super()._apply(module, device_mesh)

    with fake_world(2):
        module = parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,)), Mine())
    assert module.prepared == "called"


def test_sharding_and_apply_of_a_subclass_are_called() -> None:
    class Gathered(ColwiseParallel):
        def sharding(self, module: nn.Module) -> ModuleSharding:
            return dataclasses.replace(
                super().sharding(module), outputs=(Port(Shard(-1), Replicate()),)
            )

    with fake_world(2):
        module = parallelize_module(nn.Linear(4, 6), init_device_mesh("cpu", (2,)), Gathered())
        assert module(torch.zeros(3, 4)).shape == (3, 6)


def test_attributes_have_torchs_form() -> None:
    assert (ColwiseParallel().input_layouts, ColwiseParallel().output_layouts) == (
        (Replicate(),),
        (Shard(-1),),
    )
    assert (RowwiseParallel().input_layouts, RowwiseParallel().output_layouts) == (
        (Shard(-1),),
        (Replicate(),),
    )
    column = ColwiseParallel()
    column.desired_input_layouts = (Replicate(),)
    assert column == ColwiseParallel() and column.desired_input_layouts == (Replicate(),)
    with pytest.raises(LayoutError, match="the arriving input with input_layouts"):
        column.desired_input_layouts = (Shard(0),)
    assert SequenceParallel(sequence_dim=2).sequence_sharding == (Shard(2),)
    inputs = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    assert (inputs.input_layouts, inputs.input_kwarg_layouts, inputs.with_kwargs) == (
        (Shard(0),),
        {},
        False,
    )
    both = PrepareModuleInputOutput(
        input_layouts=(Shard(0),),
        desired_input_layouts=(Replicate(),),
        output_layouts=(Shard(1),),
        desired_output_layouts=(Replicate(),),
    )
    assert both.prepare_module_input == PrepareModuleInput(
        input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)
    )
    assert both.prepare_module_output.desired_output_layouts == (Replicate(),)
    with pytest.raises(AssertionError, match="same length"):
        PrepareModuleOutput(
            output_layouts=(Shard(0),), desired_output_layouts=(Replicate(), Replicate())
        )


@fake_world(2)
def test_what_is_assigned_to_a_style_counts_for_later_modules() -> None:
    mesh = init_device_mesh("cpu", (2,))
    style = ColwiseParallel()
    first: Any = parallelize_module(nn.Linear(3, 4), mesh, style)
    style.output_layouts = (Replicate(),)
    style.use_local_output = False
    second: Any = parallelize_module(nn.Linear(3, 4), mesh, style)
    sequence = SequenceParallel()
    sequence.sequence_sharding = (Shard(0),)
    third: Any = parallelize_module(nn.LayerNorm(3), mesh, sequence)
    x = torch.ones(2, 3)
    assert first(x).shape == (2, 2)
    assert (second(x).shape, second(x).placements) == ((2, 4), (Replicate(),))
    assert third(x).shape == (4, 3)


@pytest.mark.parametrize(
    "wrong", ["Replicate", Replicate, 3, {"x": Shard(0)}, [Shard(0), "R"], torch.ones(2)], ids=str
)
def test_layouts_that_are_no_placements_are_refused_where_they_are_given(wrong: Any) -> None:
    output: dict[str, Any] = {"output_layouts": Replicate(), "desired_output_layouts": wrong}
    keywords: dict[str, Any] = {
        "input_kwarg_layouts": {"x": wrong},
        "desired_input_kwarg_layouts": {"x": Replicate()},
    }
    styles: list[tuple[type[ParallelStyle], dict[str, Any]]] = [
        (ColwiseParallel, {"output_layouts": wrong}),
        (RowwiseParallel, {"input_layouts": wrong}),
        (HeadParallel, {"output_layouts": wrong}),
        (PrepareModuleOutput, output),
        (PrepareModuleInput, keywords),
    ]
    for style, options in styles:
        with pytest.raises(LayoutTypeError, match="must be a placement"):
            style(**options)
    with pytest.raises(LayoutTypeError, match="must be a placement"):
        ColwiseParallel().input_layouts = wrong


def test_a_placement_of_torch_is_named() -> None:
    from torch.distributed.tensor import Replicate as Theirs

    with pytest.raises(LayoutTypeError, match="use the placements of shoal_dtensor"):
        ColwiseParallel(input_layouts=Theirs())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("style", "module", "way_out"),
    [
        (
            RowwiseParallel(),
            nn.LSTM(4, 8),
            r"Shard its batch with SequenceParallel.sequence_dim=1.",
        ),
        (RowwiseParallel(), nn.GRU(4, 8, batch_first=True), r"SequenceParallel.sequence_dim=0."),
        (ColwiseParallel(), nn.LSTMCell(4, 6), "distribute_module"),
        (HeadParallel(), nn.MultiheadAttention(8, 4, add_bias_kv=True), "distribute_module"),
    ],
    ids=["LSTM", "GRU", "LSTMCell", "bias_kv"],
)
def test_modules_without_a_sharding_are_refused_with_a_way_out(
    style: Any, module: nn.Module, way_out: str
) -> None:
    with pytest.raises(UnsupportedModuleError, match=way_out):
        style.sharding(module)
