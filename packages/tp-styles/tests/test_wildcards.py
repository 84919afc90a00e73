"""Names with wildcards.  Covers: plan/wildcards.py."""

from __future__ import annotations

import pytest

from shoal_tp_styles.plan.wildcards import Tree

PATHS = [
    "",
    "tok",
    "layers",
    "layers.0",
    "layers.0.wq",
    "layers.0.wk",
    "layers.1",
    "layers.1.wq",
    "head",
    "head.wq",
]


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("", [""]),
        ("tok", ["tok"]),
        ("layers.0.wq", ["layers.0.wq"]),
        ("layers.*", ["layers.0", "layers.1"]),
        ("layers.*.w?", ["layers.0.wq", "layers.0.wk", "layers.1.wq"]),
        ("layers.[1-9].wq", ["layers.1.wq"]),
        ("*.wq", ["head.wq"]),
        ("**.wq", ["layers.0.wq", "layers.1.wq", "head.wq"]),
        (
            "layers.**",
            ["layers", "layers.0", "layers.0.wq", "layers.0.wk", "layers.1", "layers.1.wq"],
        ),
        ("**", PATHS),
        ("**.0.**.wq", ["layers.0.wq"]),
    ],
)
def test_patterns(pattern: str, paths: list[str]) -> None:
    match = Tree(PATHS).match(pattern)
    assert list(match.paths) == paths
    assert match.token is None


@pytest.mark.parametrize(
    ("pattern", "token", "reached"),
    [
        ("nothing", "nothing", ""),
        ("layers.0.wv", "wv", "layers.0"),
        ("layers.7.wq", "7", "layers"),
        ("**.zz", "zz", ""),
    ],
)
def test_where_it_stopped(pattern: str, token: str, reached: str) -> None:
    match = Tree(PATHS).match(pattern)
    assert (match.paths, match.token) == ((), token)
    assert match.reached.startswith(reached)


def test_a_path_is_listed_once() -> None:
    assert Tree(["a", "a.b", "a.b.c"]).match("**.**.c").paths == ("a.b.c",)
