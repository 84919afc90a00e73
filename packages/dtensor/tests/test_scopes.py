"""Scopes as values, and decisions that outlive a block without leaking to another policy.

Covers: scopes.py.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import pytest
import torch

from sharded_tensors import sharded
from shoal_dtensor import (
    CommunicationForbiddenError,
    Replicate,
    Shard,
    cache_info,
    checked_replicas,
    clear_cache,
    communication,
    implicit_replication,
    register_rule,
    unknown_ops,
)
from shoal_dtensor.errors import MixedTensorError, NoRuleError
from shoal_dtensor.internal import eager_only
from shoal_dtensor.rules import R, Row, Rule, S
from shoal_dtensor.rules.language.rule import overlay
from shoal_dtensor.scopes import DEFAULT, current
from shoal_mesh import DeviceMesh

aten = torch.ops.aten
NO_RULE = aten._test_functorch_fallback.default  # neither rule nor decomposition

Block = Callable[[], AbstractContextManager[None]]

BLOCKS: dict[str, Block] = {
    "implicit_replication": implicit_replication,
    "unknown_ops error": lambda: unknown_ops("error"),
    "unknown_ops local": lambda: unknown_ops("local"),
    "communication warn": lambda: communication("warn"),
    "communication forbid": lambda: communication("forbid"),
    "checked_replicas": checked_replicas,
}


def decided() -> int:
    return sum(cache_info().values())


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_the_same_settings_are_the_same_scope(block: Block) -> None:
    with block():
        first = current()
        with block():
            assert current() is first
    with block():
        assert current() is first
    assert first is not DEFAULT
    assert current() is DEFAULT


def test_a_setting_taken_back_is_the_scope_without_it() -> None:
    with communication("forbid"), implicit_replication(), communication("allow"):
        one = current()
    with implicit_replication():
        assert current() is one
        with communication("warn"), unknown_ops("error"):
            other = current()
    with unknown_ops("error"), implicit_replication(), communication("warn"):
        assert current() is other
    with communication("forbid"), communication("allow"):
        assert current() is DEFAULT


def test_there_are_as_many_scopes_as_settings() -> None:
    for unknown in ("replicate", "error", "local"):
        for moves in ("allow", "warn", "forbid"):
            for plain in (False, True):
                for checked in (False, True):
                    with ExitStack() as blocks:
                        blocks.enter_context(unknown_ops(unknown))
                        blocks.enter_context(communication(moves))
                        if plain:
                            blocks.enter_context(implicit_replication())
                        if checked:
                            blocks.enter_context(checked_replicas())
    assert len(DEFAULT.siblings) == 36


# --- decisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_entering_a_block_again_decides_nothing_anew(mesh: DeviceMesh, block: Block) -> None:
    x = sharded(mesh, torch.ones(4, 6))

    def step() -> None:
        with block():
            (x * 2 + x).relu_().sum(1)
            x.split(3, 1)
            torch.nn.functional.gelu(x)

    step()
    counts = cache_info()
    for _ in range(100):
        step()
    assert cache_info() == counts
    with block():
        assert cache_info() == counts
        clear_cache()
    assert cache_info() == {}


def test_what_was_allowed_is_forbidden_in_another_block(mesh: DeviceMesh) -> None:
    x, y = sharded(mesh, torch.ones(4, 4)), sharded(mesh, torch.ones(4, 4), dim=1)
    for _ in range(3):
        assert (x + y).shape == (4, 4)
        with (
            communication("forbid"),
            pytest.raises(CommunicationForbiddenError, match="needs implicit communication"),
        ):
            x + y
        with communication("forbid"), communication("allow"):
            assert (x + y).shape == (4, 4)


def test_a_warning_comes_with_every_entry(mesh: DeviceMesh) -> None:
    x, y = sharded(mesh, torch.ones(4, 4)), sharded(mesh, torch.ones(4, 4), dim=1)
    for _ in range(3):
        with warnings.catch_warnings():  # no warning outside
            warnings.simplefilter("error")
            x + y
        with communication("warn"), pytest.warns(UserWarning, match="needs implicit communication"):
            x + y


def test_plain_tensors_count_as_replicated_inside_only(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.ones(4))
    for _ in range(3):
        with implicit_replication():
            assert (x + torch.ones(4)).placements == (Shard(0),)
        with pytest.raises(MixedTensorError, match="together with a plain tensor"):
            x + torch.ones(4)
        with implicit_replication(), communication("forbid"):
            assert (x + torch.ones(4)).placements == (Shard(0),)
        with (
            communication("forbid"),
            pytest.raises(MixedTensorError, match="together with a plain tensor"),
        ):
            x + torch.ones(4)


def test_each_policy_treats_unknown_operators_its_way(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.ones(4))
    with pytest.warns(UserWarning, match="are replicated"):
        assert NO_RULE(x, x).placements == (Replicate(),)
    for _ in range(3):
        with unknown_ops("local"):
            assert NO_RULE(x, x).placements == (Shard(0),)
            with (
                unknown_ops("error"),
                pytest.raises(NoRuleError, match="does not have a sharding rule"),
            ):
                NO_RULE(x, x)
            with unknown_ops("replicate"):  # decided and warned of above
                assert NO_RULE(x, x).placements == (Replicate(),)
            assert NO_RULE(x, x).placements == (Shard(0),)
        with (
            unknown_ops("error"),
            implicit_replication(),
            pytest.raises(NoRuleError, match="does not have a sharding rule"),
        ):
            NO_RULE(x, x)
        with (
            unknown_ops("error"),
            pytest.raises(NoRuleError, match="does not have a sharding rule"),
        ):
            NO_RULE(x, x)


def test_replicas_are_checked_inside_only(mesh: DeviceMesh) -> None:
    with checked_replicas(), checked_replicas():
        assert current().replicas_checked
    assert not current().replicas_checked


# --- rules ----------------------------------------------------------------------------------------

WHOLE = Rule(lambda call: [Row((R,), (R,))])
CUT = Rule(lambda call: [Row((S(0),), (S(0),))])


def test_decisions_under_rules_of_a_block_end_with_it(mesh: DeviceMesh) -> None:
    x = sharded(mesh, torch.ones(4))
    assert aten.neg.default(x).placements == (Shard(0),)
    before = decided()
    for _ in range(3):
        with overlay({aten.neg.default: WHOLE}):
            for _ in range(3):
                with implicit_replication():
                    assert aten.neg.default(x).placements == (Replicate(),)
                    assert decided() == 1
            with overlay({aten.neg.default: CUT}):
                assert aten.neg.default(x).placements == (Shard(0),)
        assert aten.neg.default(x).placements == (Shard(0),)
        assert decided() == before


def test_a_rule_for_good_replaces_what_every_policy_has_decided(mesh: DeviceMesh) -> None:
    from shoal_dtensor.rules.all_rules import TABLE

    x, standing = sharded(mesh, torch.ones(4)), TABLE[aten.neg.default]
    try:
        assert aten.neg.default(x).placements == (Shard(0),)
        with implicit_replication():
            assert aten.neg.default(x).placements == (Shard(0),)
        with overlay({}), communication("warn"):
            register_rule(aten.neg.default, WHOLE, replace=True)
            with pytest.warns(UserWarning, match="needs implicit communication"):
                assert aten.neg.default(x).placements == (Replicate(),)
        assert aten.neg.default(x).placements == (Replicate(),)
        with implicit_replication():
            assert aten.neg.default(x).placements == (Replicate(),)
    finally:
        register_rule(aten.neg.default, standing, replace=True)
    assert aten.neg.default(x).placements == (Shard(0),)


# torch 2.11, of ContextVar.get
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_blocks_inside_of_compiled_code(mesh: DeviceMesh, block: Block) -> None:
    x, seen = sharded(mesh, torch.ones(4, 2)), []

    @eager_only
    def look() -> None:
        seen.append(current())

    def program(x: torch.Tensor) -> torch.Tensor:
        with block():
            look()
            return x * 2 + x

    assert torch.compile(program, backend="eager")(x).shape == (4, 2)
    with block():
        assert seen == [current()]
    assert current() is DEFAULT
