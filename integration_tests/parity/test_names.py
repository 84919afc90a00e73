"""Every public name of torch's four modules exists in shoal.

It takes the same arguments under the same names.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

pytestmark = pytest.mark.parity

MODULES = {
    "torch.distributed.device_mesh": "shoal_mesh",
    "torch.distributed.tensor": "shoal_dtensor",
    "torch.distributed.tensor.experimental": "shoal_dtensor",
    "torch.distributed.tensor.parallel": "shoal_tp_styles",
    "torch.distributed._shard": "shoal_shard_api",
    "torch.distributed._shard.sharded_tensor": "shoal_shard_api",
    "torch.distributed._shard.sharding_spec": "shoal_shard_api",
    "torch.distributed._shard.sharding_plan": "shoal_shard_api",
    "torch.distributed._shard.sharder": "shoal_shard_api",
}
# These are how torch registers F.embedding and F.embedding_bag for its ShardedTensor, which nobody
# calls by name.
ABSENT = {"sharded_embedding", "sharded_embedding_bag"}
ELSEWHERE = {"context_parallel": "shoal_context_parallel"}


def public(module: Any) -> list[str]:
    """The names that a module is used for.

    They are its `__all__`, else the classes and functions that live under it.
    """
    if hasattr(module, "__all__"):
        return list(module.__all__)
    found = []
    for name, value in vars(module).items():
        if name.startswith("_") and name not in (
            "_shard_tensor",
            "_infer_sharding_spec_from_shards_metadata",
        ):
            continue
        home = getattr(value, "__module__", "")
        # The functions of `_ops` are how torch registers operators on its ShardedTensor; nobody
        # calls them by name.
        if (
            (inspect.isclass(value) or inspect.isfunction(value))
            and "_shard" in home
            and "._ops" not in home
        ):
            found.append(name)
    return found


CASES = [
    (peer, name)
    for peer in MODULES
    for name in public(importlib.import_module(peer))
    if name not in ABSENT
]


@pytest.mark.parametrize(
    ("peer", "name"), CASES, ids=lambda value: value.removeprefix("torch.distributed.")
)
def test_the_name_exists_and_takes_the_same_arguments(peer: str, name: str) -> None:
    theirs = getattr(importlib.import_module(peer), name)
    ours = getattr(importlib.import_module(ELSEWHERE.get(name, MODULES[peer])), name)
    assert inspect.isclass(theirs) == inspect.isclass(ours)
    if inspect.isclass(theirs):
        missing = [
            attribute
            for attribute, value in vars(theirs).items()
            if not attribute.startswith("_")
            and callable(getattr(theirs, attribute))
            and not hasattr(ours, attribute)
        ]
        assert not missing, f"{name} lacks {missing}"
    assert not lacking(theirs, ours)


def lacking(theirs: Any, ours: Any) -> list[str]:
    """Parameters that torch has and shoal has not, or at another position."""
    try:
        peer, own = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
    except ValueError:
        return []
    if any(p.kind is p.VAR_KEYWORD for p in peer.values()):
        return []
    free = any(p.kind is p.VAR_KEYWORD for p in own.values())
    positional = [
        n for n, p in peer.items() if p.kind is p.POSITIONAL_OR_KEYWORD and not n.startswith("_")
    ]
    found = [n for n, p in own.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    wrong = [n for i, n in enumerate(positional) if n not in own and not free]
    wrong += [n for i, n in enumerate(positional) if n in found and found.index(n) != i]
    return wrong + [
        n
        for n, p in peer.items()
        if p.kind is p.KEYWORD_ONLY and n not in own and not free and n[0] != "_"
    ]
