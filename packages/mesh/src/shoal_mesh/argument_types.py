"""Checks of argument types with one wording for all errors, and names of ranks in texts.

May import: errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import UnionType

from .errors import CollectiveTypeError, MeshTypeError

Kinds = type | UnionType
TypeErrors = type[MeshTypeError] | type[CollectiveTypeError]


def require(value: object, kinds: Kinds, taken: str, error: TypeErrors = MeshTypeError) -> None:
    """Raise `error` unless a value is an instance of `kinds`; `taken` describes the allowed values.

    Example:
        >>> require("0", int, "a dim of a tensor is an int")
        Traceback (most recent call last):
        shoal_mesh.errors.MeshTypeError: a dim of a tensor is an int, got str '0'
    """
    if not isinstance(value, kinds):
        raise error(f"{taken}, got {kind_of(value)}")


def require_each(
    values: object, kinds: Kinds, taken: str, error: TypeErrors = MeshTypeError
) -> None:
    """Raise `error` unless `values` is a sequence of instances of `kinds`, and not a string."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise error(f"{taken}, got {kind_of(values)}")
    for value in values:
        if not isinstance(value, kinds):
            container = type(values).__name__
            raise error(f"{taken}, got {container} with {kind_of(value)}")


def kind_of(value: object) -> str:
    """Describe an argument of a wrong type: its class and value, and a hint for torch's mesh."""
    if value is None:
        return "None"
    kind = type(value)
    if not kind.__module__.startswith("torch"):
        return f"{kind.__name__} {value!r:.80}"
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__name__ != "DeviceMesh":
        return name
    return (
        f"torch's own {name}: make a mesh of shoal with init_device_mesh, or over the groups of "
        "this one with DeviceMesh.from_group(m.get_all_groups(), m.device_type, m.mesh, "
        "mesh_dim_names=m.mesh_dim_names)"
    )


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the name of some ranks in texts: `rank 3`, `ranks 0, 1`, `ranks 0-2, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names: list[str] = []
    for run in runs:
        if len(run) > 2:
            names.append(f"{run[0]}-{run[-1]}")
        else:
            names += map(str, run)
    count = sum(map(len, runs))
    noun = "ranks" if count > 1 else "rank"
    return f"{noun} {', '.join(names)}"


def by_ranks(texts: Mapping[int, str]) -> dict[str, str]:
    """Group ranks with equal texts: from rank -> text, return name of ranks -> text.

    Example:
        >>> by_ranks({0: "lost", 1: "lost", 2: "waits"})
        {'ranks 0, 1': 'lost', 'rank 2': 'waits'}
    """
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks_by_text.setdefault(text, []).append(rank)
    return {name_ranks(ranks): text for text, ranks in ranks_by_text.items()}
