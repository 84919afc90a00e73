"""Types of plain tensors, their inference from the rules, and the texts of errors.

Covers: spmd/assertions.py, spmd/checker.py, spmd/checker_state.py, spmd/declared.py,
spmd/first_check.py, spmd/function_hints.py, spmd/inference/infer.py, spmd/inference/local_calls.py,
spmd/inference/messages.py, spmd/inference/operand_layouts.py, spmd/inference/operator_call.py,
spmd/inference/parts.py, spmd/interface.py, spmd/local_map_types.py, spmd/module_boundaries.py,
spmd/types/axis_types.py, spmd/types/mesh_axes.py, spmd/types/tensor_types.py,
_torch/process_groups.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal_dtensor import Shard as ShardPlacement, distribute_tensor
from shoal_dtensor.errors import ArgumentTypeError, SpmdTypeError
from shoal_dtensor.internal import I, P, R, ShardType as S, V, spmd
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import fake_world

MESH = abstract_mesh((2, 4), ("dp", "tp"))


def typed(*shape: int, dp: Any = R, tp: Any = R, grad: bool = True) -> Any:
    tensor = torch.empty(shape, device="meta", requires_grad=grad)
    spmd.assert_tensor_type(tensor, {"dp": dp, "tp": tp})
    return tensor


def kinds(tensor: Tensor) -> str:
    return repr(spmd.type_of(tensor))


def checked(run: Callable[[], Any], *, local: bool = False) -> Any:
    with spmd.set_current_mesh(MESH), spmd.typecheck(local=local):
        return run()


def refusal(run: Callable[[], Any], *, local: bool = False) -> str:
    with pytest.raises(SpmdTypeError) as caught:
        checked(run, local=local)
    return str(caught.value)


def test_types_of_gradients_and_values_of_types() -> None:
    assert [kind.backward_type() for kind in (R, I, V, P, S(1))] == [P, I, V, R, S(1)]
    assert S(-1).resolve(3) is S(2)
    parts = spmd.joined_type(1, [(4, I), (4, I), (2, R)])
    assert repr(parts.backward_type()) == "I[0:8] P[8:10] along dim 1"
    for kind in (R, I, V, P, S(1), spmd.pending("max"), parts):
        assert pickle.loads(pickle.dumps(kind)) is kind
    with pytest.raises(ArgumentTypeError, match="expected an int"):
        S("tp")  # type: ignore[arg-type]  # what is refused


def test_axes_are_sets_of_ranks() -> None:
    dp = spmd.MeshAxis.of(2, 4)
    tp = spmd.MeshAxis.of(4, 1)
    assert (dp.offsets, tp.size()) == ((0, 4), 4)
    assert dp.isorthogonal(tp)
    assert not dp.isorthogonal(spmd.MeshAxis.of(2, 4))
    assert spmd.flatten_axes((dp, tp)) == spmd.MeshAxis.of(8, 1)
    assert spmd.MeshAxis.of(2, 1) <= tp
    assert spmd.normalize_mesh([dp, spmd.MeshAxis.of(1, 1)]) == {dp}
    with pytest.raises(SpmdTypeError, match="orthogonal"):
        spmd.normalize_mesh([tp, spmd.MeshAxis.of(2, 1)])
    with (
        pytest.raises(SpmdTypeError, match="join the same ranks"),
        spmd.set_current_mesh({"a": tp, "b": spmd.MeshAxis.of(2, 1)}),
    ):
        pass
    with pytest.raises(ArgumentTypeError, match="size and stride"):
        spmd.MeshAxis.of(4)


def test_a_type_is_no_part_of_a_copy() -> None:
    x = checked(lambda: typed(4))
    assert spmd.type_of(copy.deepcopy(x.detach())) is None


RESULTS: list[tuple[Callable[[], Tensor], str]] = [
    (lambda: typed(4, 8, dp=S(0)) @ typed(8, 6, tp=S(1)), "{dp: S(0), tp: S(1)}"),
    (lambda: typed(4, 8, tp=S(1)) @ typed(8, 6, tp=S(0)), "{dp: R, tp: P}"),
    (lambda: typed(4, 8, tp=P) * 3 + typed(4, 8, tp=P), "{dp: R, tp: P}"),
    (lambda: typed(4, dp=S(0), tp=R).sum(), "{dp: P, tp: R}"),
    (lambda: typed(4, dp=S(0)).mean(), "{dp: P(avg), tp: R}"),
    (lambda: typed(4, tp=S(0)).amax(), "{dp: R, tp: P(max)}"),
    (lambda: typed(4, tp=I, dp=I).exp(), "{dp: I, tp: I}"),
    (lambda: typed(4) * typed(4, tp=I, grad=False), "{dp: R, tp: R}"),
    (lambda: typed(4, tp=I) * typed(4, grad=False), "{dp: R, tp: I}"),
    (lambda: typed(4, 6, tp=S(1)) + torch.ones(6, device="meta")[:1], "{dp: R, tp: S(1)}"),
    (lambda: typed(4, 2, 6, dp=S(0), tp=S(2)).view(8, 6), "{dp: S(0), tp: S(1)}"),
    (lambda: typed(4, 24, tp=S(1)).view(4, -1, 6), "{dp: R, tp: S(1)}"),
    (lambda: typed(4, 2, 6, tp=S(1)).flatten(0, 1), "{dp: R, tp: S(0) in runs}"),
    (lambda: typed(4, 2, 6, tp=S(1)).flatten(0, 1).view(4, 2, 6), "{dp: R, tp: S(1)}"),
    (lambda: typed(4, 24, tp=S(1)).reshape(4, -1, 6), "{dp: R, tp: S(1)}"),
    (lambda: typed(4, 24, tp=S(1)).unflatten(1, (-1, 6)), "{dp: R, tp: S(1)}"),
    (lambda: typed(4, 6, 8, tp=S(0)).reshape(24, -1), "{dp: R, tp: S(0)}"),
    (lambda: typed(6, tp=S(0)).view(2, 3), "{dp: R, tp: S(0)}"),
    # one row per rank: a batch of as many rows as ranks, or a longer row
    (lambda: typed(8, tp=S(0)).view(1, 8), "{dp: R, tp: V}"),
    (lambda: F.linear(typed(1, 3, 8, tp=S(1)), typed(5, 8)), "{dp: R, tp: S(1)}"),
    (lambda: F.linear(typed(1, 3, 8, tp=S(0)), typed(5, 8)), "{dp: R, tp: S(0)}"),
    # one head on each rank: a product merges it with the batch, not with the length
    (lambda: typed(3, 1, 5, 2, tp=S(1)) @ typed(3, 1, 2, 7, tp=S(1)), "{dp: R, tp: S(1)}"),
    (lambda: F.layer_norm(typed(4, 8, tp=S(0)), (8,)), "{dp: R, tp: S(0)}"),
    (lambda: typed(8, 8, tp=S(0)).split(4, 1)[1], "{dp: R, tp: S(0)}"),
    (lambda: typed(4, tp=S(0)).detach(), "{dp: R, tp: S(0)}"),
]


def latent(*, grad: bool = True) -> Tensor:
    """Return 6 invariant features and 2 replicated ones, (4, 8)."""
    return torch.cat([typed(4, 6, tp=I, grad=grad), typed(4, 2, grad=grad)], -1)


def gate_and_up() -> Tensor:
    """Return a shard of 16 gates, and behind it a shard of 16 others, (4, 8)."""
    fused: Tensor = typed(4, 8)
    kind = spmd.joined_type(1, [(4, S(1)), (4, S(1))])
    present = spmd.type_of(fused)
    assert present is not None
    spmd.set_type(fused, present.with_axis(spmd.normalize_axis("tp"), kind))
    return fused


RESULTS += [
    (latent, "{dp: R, tp: I[0:6] R[6:8] along dim 1}"),
    (lambda: torch.split(latent(), [6, 2], -1)[0], "{dp: R, tp: I}"),
    (lambda: torch.split(latent(), [6, 2], -1)[1], "{dp: R, tp: R}"),
    (lambda: torch.split(latent(), 4, -1)[1], "{dp: R, tp: I[0:2] R[2:4] along dim 1}"),
    (lambda: latent()[..., 6:], "{dp: R, tp: R}"),
    (lambda: latent().select(1, 2), "{dp: R, tp: I}"),
    (lambda: latent().t()[:6], "{dp: R, tp: I}"),
    (lambda: latent().view(2, 1, 2, 8), "{dp: R, tp: I[0:6] R[6:8] along dim 3}"),
    (lambda: latent().double() * 2, "{dp: R, tp: I[0:6] R[6:8] along dim 1}"),
    (lambda: torch.cat([latent(), typed(4, 3)], -1), "{dp: R, tp: I[0:6] R[6:11] along dim 1}"),
    (lambda: torch.cat([latent(), latent()])[:, 6:], "{dp: R, tp: R}"),
    (lambda: (latent() + latent().exp())[:, 6:], "{dp: R, tp: R}"),
    (lambda: torch.cat([latent().detach(), typed(4, 8, tp=I)]), "{dp: R, tp: I}"),
    (lambda: latent().detach() + typed(4, 8, tp=I, grad=False), "{dp: R, tp: R}"),
    (lambda: latent().detach().sum(), "{dp: R, tp: R}"),
    (lambda: latent(grad=False), "{dp: R, tp: R}"),
    (lambda: torch.chunk(gate_and_up(), 2, -1)[1], "{dp: R, tp: S(1)}"),
    (lambda: gate_and_up().detach().relu()[:, 4:], "{dp: R, tp: S(1)}"),
    (lambda: gate_and_up().t()[:4], "{dp: R, tp: S(0)}"),
    (lambda: gate_and_up().unsqueeze(1), "{dp: R, tp: S(2)[0:4] S(2)[4:8] along dim 2}"),
    (
        lambda: torch.cat([typed(4, tp=I, grad=False), torch.ones(2, device="meta")]),
        "{dp: R, tp: I}",
    ),
]


@pytest.mark.parametrize(("run", "expected"), RESULTS, ids=map(str, range(len(RESULTS))))
def test_results_follow_the_rows_of_rules(run: Callable[[], Tensor], expected: str) -> None:
    assert checked(lambda: kinds(run())) == expected


REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: typed(4, 8, tp=P).relu(), "counted 4 times"),
    (lambda: typed(4, 8, tp=P) * typed(4, 8, tp=P), "all_reduce"),
    (lambda: typed(4, 8, tp=P) + 1, "P over tp"),
    (lambda: typed(4, 8, tp=P) + typed(4, 8), "no row"),
    (lambda: typed(4, 8, tp=I) @ typed(8, 6, tp=S(1)), r"convert(x, 'tp', src=I, dst=R)"),
    (lambda: typed(4, tp=I) * typed(4), "R and I cannot be combined"),
    (lambda: typed(4, 8, tp=S(1)).softmax(-1), "all_gather(x, 'tp', src=S(1), dst=R)"),
    (lambda: typed(4, 8, tp=S(0)) + typed(4, 8, tp=S(1)), "do not fit"),
    (lambda: typed(8, 4, tp=S(0))[:2], "slice(8x4"),
    (lambda: typed(8, 4, tp=S(0)).select(0, 1), "select(8x4"),
    # one process would make 2 rows of 12, and the ranks make 8 rows of 3
    (lambda: typed(6, tp=S(0)).view(2, -1), "view(6"),
    (lambda: typed(6, tp=S(0)).reshape(2, -1), "view(6"),
    (lambda: typed(6, tp=S(0)).unflatten(0, (2, -1)), "view(6"),
    (lambda: F.layer_norm(typed(4, 8, tp=S(1)), (8,)), "layer_norm"),
    (lambda: F.embedding(typed(4, grad=False).long(), typed(8, 2, tp=S(0))), "embedding"),
    (lambda: typed(4, tp=V).exp(), "not known to be a shard"),
    (lambda: typed(4, tp=S(0), grad=False).add_(typed(4, grad=False)), "add_(4"),
    (lambda: typed(4, grad=False).copy_(typed(4, tp=V, grad=False)), "V"),
    (lambda: torch.empty(4, device="meta").copy_(typed(4, tp=S(0))), "constant"),
    (lambda: typed(4) + torch.empty(4, device="meta").normal_(), "does not have a type"),
    (lambda: latent().sum(-1), "torch.split(x, [6, 2], dim=1) first"),
    (lambda: latent() * typed(4, 8), "this operator would mix them"),
    (lambda: latent() * typed(4, 8, tp=S(0)), "this operator would mix them"),
    (lambda: torch.cat([latent(), typed(4, 8)]), "this operator would mix them"),
    (lambda: latent() * latent()[:, 6:7], "this operator would mix them"),
    (lambda: latent().view(4, 2, 4), "this operator would mix them"),
    (lambda: latent()[:, ::2], "this operator would mix them"),
    (lambda: torch.cat([typed(4, tp=I), typed(4, tp=S(0))]), "I cannot be combined"),
    (lambda: gate_and_up() * typed(4, 8, tp=S(1)), "shards of different tensors"),
    (lambda: gate_and_up()[:, :2], "torch.split(x, [4, 4], dim=1) first"),
    (lambda: gate_and_up().detach().sum(), "shards of different tensors"),
    (lambda: gate_and_up().select(1, 0), "shards of different tensors"),
    (lambda: torch.cat([gate_and_up(), gate_and_up()], 1), "shards of different tensors"),
]


@pytest.mark.parametrize(("run", "message"), REFUSALS, ids=map(str, range(len(REFUSALS))))
def test_calls_that_no_row_allows_are_refused(run: Callable[[], Any], message: str) -> None:
    text = refusal(run)
    assert message in text, text


def test_an_operand_that_is_not_summed_yet_is_named_beside_an_invariant_one() -> None:
    text = refusal(lambda: typed(4, 8, tp=I) + typed(4, 8, tp=P))
    assert "all_reduce(x, 'tp', src=P, dst=I) for the P operand" in text
    assert "Way out: all_gather the sharded operands" in refusal(lambda: typed(8, 4, tp=S(0))[0])
    without_axis = torch.empty(4, device="meta", requires_grad=True)

    def run() -> None:
        spmd.assert_tensor_type(without_axis, {"tp": R})
        without_axis * typed(4)

    assert ": mul: the operand's type {tp: R} lacks the axes dp" in refusal(run)


@pytest.mark.parametrize(
    ("present", "wanted", "advice"),
    [
        (P, R, "all_reduce(x, 'tp', src=P, dst=R)"),
        (P, S(1), "reduce_scatter(x, 'tp', src=P, dst=S(1))"),
        (S(0), R, "all_gather(x, 'tp', src=S(0), dst=R)"),
        (S(0), S(1), "pass src=S(0), or all_to_all(x, 'tp', src=S(0), dst=S(1)) first"),
        (S(0), P, "all_gather(x, 'tp', src=S(0), dst=R), not summed"),
        (V, S(0), "assert_type(x, {'tp': S(0)}), if it is a shard"),
        (R, P, "leave the reduction out"),
        (I, R, "convert(x, 'tp', src=I, dst=R)"),
        (R, S(0), "convert(x, 'tp', src=R, dst=S(0))"),
        (R, I, "pass the type that the tensor has"),
        (spmd.pending("max"), P, 'src=pending("max")'),
        (spmd.pending("avg"), P, "sum instead of the mean"),
    ],
)
def test_a_wrong_source_type_has_a_way_out(present: Any, wanted: Any, advice: str) -> None:
    def run() -> None:
        x = typed(4, 8)
        found = spmd.type_of(x)
        assert found is not None
        axis = spmd.normalize_axis("tp")
        spmd.set_type(x, found.with_axis(axis, present))
        spmd.check_source(x, axis, wanted, "a collective")

    text = refusal(run)
    assert text.startswith(f"{__file__}:")
    assert advice in text.partition("Way out: ")[2]


def test_an_error_names_the_line_the_operator_the_types_and_the_way_out() -> None:
    text = refusal(lambda: typed(4, 8, dp=S(0), tp=P).tanh())
    assert text.startswith(f"{__file__}:")
    assert "tanh(4x8 S(0)@dp, P@tp)" in text
    assert "all_reduce(x, 'tp', src=P, dst=R), or reduce_scatter" in text


def test_ranks_compute_on_their_own_in_local_mode() -> None:
    def run() -> list[str]:
        shard = typed(4, 8, tp=S(0))
        whole = typed(4, 8)
        with pytest.raises(SpmdTypeError, match="P cannot be combined with V"):
            shard + typed(4, 8, tp=P)
        with pytest.raises(SpmdTypeError, match="I cannot be combined"):
            shard + typed(4, 8, tp=I)
        return [kinds(shard + whole), kinds(shard.softmax(0)), kinds(typed(4, tp=P) * 2)]

    assert checked(run, local=True) == ["{dp: R, tp: V}", "{dp: R, tp: V}", "{dp: R, tp: P}"]


def test_parts_that_are_shards_are_varying_in_local_mode() -> None:
    assert checked(lambda: kinds(gate_and_up().sum()), local=True) == "{dp: R, tp: V}"
    assert checked(lambda: kinds(latent()[:, 6:].sum()), local=True) == "{dp: R, tp: R}"
    assert "would mix them" in refusal(lambda: latent().sum(), local=True)


def test_one_axis_may_be_local_in_global_mode() -> None:
    with spmd.set_current_mesh(MESH, local_axes=("dp",)), spmd.typecheck(local=False):
        x = typed(4, 8, dp=V, tp=S(1))
        assert kinds(x @ typed(8, 3, tp=S(0))) == "{dp: V, tp: P}"
        with pytest.raises(SpmdTypeError):
            x.softmax(1)
        assert kinds(x.softmax(0)) == "{dp: V, tp: S(1)}"


def test_an_expanded_tensor_is_a_shard_beside_shards() -> None:
    def run() -> list[str]:
        # (batch, heads, positions, features): 4 heads of each rank
        heads = typed(2, 4, 6, 8, tp=S(1))
        rotary = typed(2, 1, 6, 4).expand(-1, 4, -1, -1)
        whole = heads.new_empty(2, 4, 6, 12)
        whole[..., :8].copy_(heads)
        whole[..., 8:].copy_(rotary)
        longer = heads.new_empty(2, 5, 6, 12)
        return [kinds(whole), kinds(torch.cat([heads, rotary], -1)), kinds(longer)]

    of_heads = "{dp: R, tp: S(1)}"
    assert checked(run) == [of_heads, of_heads, "{dp: R, tp: R}"]


def test_an_expanded_tensor_with_a_complete_gradient_is_refused() -> None:
    def run() -> Tensor:
        heads = typed(2, 4, 6, 8, tp=S(1))
        return torch.cat([heads, typed(2, 1, 6, 4, tp=I).expand(-1, 4, -1, -1)], -1)

    with pytest.raises(SpmdTypeError, match="I cannot be combined"):
        checked(run)


def test_two_axes_of_one_dim_keep_their_order() -> None:
    def run() -> str:
        x = torch.empty(4, 8, device="meta")
        spmd.assert_tensor_type(x, {}, (("tp", "dp"), None))
        return kinds(x.exp().view(4, 2, 4))

    assert checked(run) == "{dp: S(0), tp: S(0)} (dim 0 by tp, dp)"


def test_assertions_on_wrong_axes_and_dims() -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: spmd.assert_tensor_type(torch.empty(4), {"cp": R}), "axis 'cp'"),
        (lambda: spmd.assert_tensor_type(torch.empty(4), {"tp": S(1)}), "1 dims"),
        (lambda: spmd.assert_tensor_type(torch.empty(4), {"tp": R}, ("tp",)), "is R and shards"),
        (lambda: spmd.assert_tensor_type(torch.empty(4), {}, ("tp", None)), "2 entries"),
        (lambda: spmd.assert_tensor_type(torch.empty(4, 4), {}, ("tp", "tp")), "twice"),
        (lambda: spmd.assert_tensor_type(torch.empty(4), {"tp": S(0)}, ("dp",)), "one of them"),
        (
            lambda: spmd.assert_tensor_type(
                torch.empty(4),
                {"tp": "R"},  # type: ignore[dict-item]  # what is refused
            ),
            "R, I, V, P",
        ),
    ]
    for run, message in cases:
        text = refusal(run)
        assert message in text, text

    def incomplete() -> Tensor:
        x = torch.empty(4, device="meta")
        spmd.assert_tensor_type(x, {"tp": R})
        return x.exp()

    assert "lacks the axes dp" in refusal(incomplete)


def test_fake_tensors_have_types_and_attributes() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 6)

        def run() -> tuple[torch.device, str]:
            spmd.assert_tensor_type(x, {"dp": R, "tp": S(1)})
            # an index reads the device by an operator
            return x.device, kinds(x[0])

        assert checked(run) == (torch.device("cpu"), "{dp: R, tp: S(0)}")


def test_collectives_without_types_are_refused() -> None:
    with fake_world(8), spmd.set_current_mesh(MESH), spmd.typecheck():
        x = torch.ones(4)
        spmd.assert_tensor_type(x, {"dp": R, "tp": P})
        with pytest.raises(SpmdTypeError, match="no_typecheck"):
            dist.all_reduce(x)
        with spmd.paused():
            dist.all_reduce(x)


def test_nothing_is_left_when_the_block_ends() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    with spmd.set_current_mesh(MESH), spmd.typecheck():
        x = typed(4)
        assert torch.autograd.Function.__dict__["apply"] is not before
    assert torch.autograd.Function.__dict__["apply"] is before
    assert spmd.type_of(x * 2) is None
    assert not spmd.is_active()


def test_a_backward_pass_is_not_checked() -> None:
    def run() -> Tensor:
        x = torch.ones(4, requires_grad=True)
        spmd.assert_tensor_type(x, {"dp": R, "tp": R})
        (x * x).sum().backward()  # type: ignore[no-untyped-call]  # of torch
        assert x.grad is not None
        return x.grad

    gradient = checked(run)
    assert gradient.tolist() == [2, 2, 2, 2]
    assert spmd.type_of(gradient) is None


def test_a_module_with_a_backward_hook_keeps_types() -> None:
    linear = torch.nn.Linear(8, 4, device="meta")
    linear.register_full_backward_hook(lambda module, grads, outs: grads)

    def run() -> str:
        for parameter in linear.parameters():
            spmd.assert_tensor_type(parameter, {"dp": R, "tp": R})
        return kinds(linear(typed(3, 8, tp=S(0))))

    assert checked(run) == "{dp: R, tp: S(0)}"


def test_distribute_tensor_is_not_checked_inside() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with spmd.set_current_mesh(mesh), spmd.typecheck(local=False):
            rows = torch.randn(6, 4)
            spmd.assert_tensor_type(rows, {"dp": S(0), "tp": I})
            assert distribute_tensor(rows, mesh["tp"], [ShardPlacement(0)]).shape == (6, 4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_code_is_checked(use_reentrant: bool) -> None:
    def run(wrong: bool) -> str:
        x = typed(4, 8, tp=I)
        weight = typed(8, 4, tp=S(1) if wrong else I)
        result = checkpoint(lambda x: (x @ weight).exp(), x, use_reentrant=use_reentrant)
        return kinds(result)

    assert checked(lambda: run(wrong=False)) == "{dp: R, tp: I}"
    assert "I cannot be combined" in refusal(lambda: run(wrong=True))


def test_operators_without_a_rule_take_equal_operands() -> None:
    @torch.library.custom_op("shoal_spmd_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    def run() -> str:
        x = torch.ones(4)
        spmd.assert_tensor_type(x, {"dp": R, "tp": I})
        shard = torch.ones(4)
        spmd.assert_tensor_type(shard, {"dp": R, "tp": S(0)})
        with pytest.raises(SpmdTypeError, match="register_rule"):
            twice(shard)
        return kinds(twice(x))

    assert checked(run) == "{dp: R, tp: I}"


def test_axes_of_one_rank_may_have_any_types() -> None:
    mesh = abstract_mesh((1, 2, 1), ("dp", "tp", "cp"))
    tensor = torch.empty(4, 4, device="meta")
    with spmd.set_current_mesh(mesh), spmd.typecheck():
        spmd.assert_tensor_type(tensor, {"dp": R, "tp": I, "cp": S(0)})
        assert kinds(tensor) == "{tp: I}"
        sharded = torch.empty(4, 4, device="meta")
        spmd.assert_tensor_type(sharded, {"dp": R}, (("dp", "tp"), "cp"))
        assert kinds(sharded) == "{tp: S(0)}"


def test_one_rank_computes_with_types_without_axes() -> None:
    """The mesh has no axis with several ranks, and the operators have one and two outputs."""
    with spmd.set_current_mesh(abstract_mesh((1, 1), ("dp", "tp"))), spmd.typecheck(local=False):
        x = typed(4, 8, tp=S(0))
        values, indices = (x * 2).max(1)
    assert [kinds(tensor) for tensor in (values, indices)] == ["{}", "{}"]
