"""Covers: errors.py: each error is also the builtin that a caller of torch expects."""

from __future__ import annotations

import pickle

import pytest

from shoal_mesh import errors

BUILTINS: dict[str, set[type[Exception]]] = {
    "AxisError": {ValueError, RuntimeError, KeyError, IndexError},
    "BackendError": {ValueError, RuntimeError},
    "CollectiveError": {ValueError, RuntimeError},
    "CollectiveTypeError": {TypeError, ValueError, RuntimeError},
    "DeadlockError": {ValueError, RuntimeError},
    "DimError": {IndexError, ValueError, RuntimeError},
    "LockstepError": {ValueError, RuntimeError},
    "MeshError": {ValueError, RuntimeError},
    "MeshMismatchError": {ValueError, RuntimeError},
    "MeshTypeError": {TypeError, ValueError, RuntimeError},
    "MissingExtraError": {ValueError, RuntimeError},
    "NoGroupError": {ValueError, RuntimeError},
    "PeerError": {ValueError, RuntimeError},
    "NewcomerError": {RuntimeError},
    "RankError": {RuntimeError},
}


@pytest.mark.parametrize(
    "name", [name for name, value in vars(errors).items() if isinstance(value, type)]
)
def test_builtin_types(name: str) -> None:
    error = getattr(errors, name)
    builtins = (TypeError, ValueError, RuntimeError, KeyError, IndexError)
    assert {kind for kind in builtins if issubclass(error, kind)} == BUILTINS[name]
    back = pickle.loads(pickle.dumps(error("two words")))
    assert type(back) is error
    assert str(back) == "two words"
