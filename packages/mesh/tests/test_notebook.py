"""Covers: notebook.py: cells on ranks that stay up, with their variables and the notebook's."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

import shoal_mesh
from shoal_mesh.errors import MeshError, RankError
from shoal_mesh.local_ranks.pool import kept_pool
from shoal_mesh.notebook import run_cell

NAME = shoal_mesh.__name__  # also in a host that vendors it
Shown = list[tuple[str, str, list[int]]]


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_mesh.local_ranks.launch._KEPT", [True])
    kept_pool.cache_clear()


def shown(cell: str, variables: dict[str, object], ranks: str = "2") -> Shown:
    found: Shown = []
    run_cell(ranks, cell, variables, lambda *what: found.append(what))
    return found


def test_cells_share_ranks_and_variables() -> None:
    def doubled(x: int) -> int:
        return 2 * x

    notebook = {"scale": 10, "doubled": doubled, "file": open}
    first = (
        "import os\nimport torch.distributed as dist\nrank, here = dist.get_rank(), os.getpid()\n"
    )
    second = "print('both')\nrank * scale"
    assert shown(first + second, notebook) == [
        ("text", "both\n", [0, 1]),
        ("text", "0\n", [0]),
        ("text", "10\n", [1]),
    ]
    assert shown("assert here == os.getpid()\ndoubled(rank)", notebook) == [
        ("text", "0\n", [0]),
        ("text", "2\n", [1]),
    ]
    assert shown("scale", {"scale": 11}) == [("text", "11\n", [0, 1])]  # the notebook's new value
    assert shown("scale = 5", {"scale": 12}) == []
    assert shown("scale", {"scale": 13}) == [("text", "5\n", [0, 1])]  # a cell of ranks has set it
    assert shown("scale;", {}) == []


def test_ranks_know_the_classes_of_the_notebook() -> None:
    notebook: dict[str, object] = {"__name__": "__main__"}
    exec("class Model:\n    width = 4\n\nmodel = Model()", notebook)
    assert shown("isinstance(model, Model) and model.width", notebook) == [("text", "4\n", [0, 1])]


def test_html_is_shown_as_html() -> None:
    (one,) = shown(
        f"from {NAME} import init_device_mesh\ninit_device_mesh('cpu', (2,), "
        "mesh_dim_names=('tp',))",
        {},
    )
    assert one[0] == "html" and "<td>1</td>" in one[1] and one[2] == [0, 1]


def test_what_cannot_be_sent_is_said_where_it_is_missed() -> None:
    lock = (letter for letter in "ab")
    with pytest.raises(
        RankError,
        match=r"name 'lock' is not defined[\s\S]*The notebook has 'lock', but cannot send",
    ):
        shown("lock", {"lock": lock})


ALONE = {
    "the first collective of a group": f"""
from {NAME} import all_reduce, comm_over
import torch, torch.distributed as dist
if dist.get_rank() == 0: all_reduce(torch.ones(2), comm_over((0, 1)))""",
    "a mesh": f"""
from {NAME} import init_device_mesh
import torch.distributed as dist
if dist.get_rank() == 0: init_device_mesh("cpu", (2,))""",
    "a call of torch": """
import torch, torch.distributed as dist
if dist.get_rank() == 0: dist.all_reduce(torch.ones(2))""",
}


# shoal looks at the other ranks itself, and the parent looks at ranks that are in calls of torch
FOUND = {
    "the first collective of a group": "rank 1 has returned, and others wait in the first",
    "a mesh": "rank 1 has returned, and others wait in a comparison",
    "a call of torch": "rank 0 had not returned and waited in a collective for ranks that had",
}


# the cell waited until the timeout of the process group, half an hour
@pytest.mark.parametrize("name", ALONE)
def test_a_collective_on_one_rank_ends_the_cell(name: str) -> None:
    with pytest.raises(RankError, match=FOUND[name]):
        shown(ALONE[name], {})
    assert shown("1", {}) == [("text", "1\n", [0, 1])]


def test_a_slow_rank_does_not_end_the_cell() -> None:
    cell = "import time, torch.distributed as dist\nif dist.get_rank() == 0: time.sleep(6)\n5"
    assert shown(cell, {}) == [("text", "5\n", [0, 1])]


def test_a_line_without_a_number_is_refused() -> None:
    with pytest.raises(MeshError, match="takes a number of ranks"):
        shown("1", {}, ranks="all")


def test_the_extension_in_ipython(capsys: pytest.CaptureFixture[str]) -> None:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", NAME)
    shell.run_cell_magic("ranks", "2", "print('hello')")  # type: ignore[no-untyped-call]  # IPython
    assert "[ranks 0, 1] hello" in capsys.readouterr().out
