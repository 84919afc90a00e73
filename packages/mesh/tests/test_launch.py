"""Covers: launch.py: from programs, scripts, under torchrun."""

from __future__ import annotations

import re
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import MeshError, all_reduce, comm_over, init_device_mesh, launch
from shoal_mesh.errors import MeshTypeError, RankError
from shoal_mesh.testing import fake_world, on_ranks
from started_scripts import SCRIPT, run_script, two_at_a_time


def _total(start: float, *, scale: float = 1.0) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return float(all_reduce(torch.tensor(start + mesh.get_rank()), (mesh, 0))) * scale


def _all_refuse(text: str) -> None:
    raise ValueError(text)


def _one_refuses() -> None:
    raise ValueError(f"rank {dist.get_rank()}")


def _waits_for_the_others(how: str) -> None:
    if dist.get_rank() == 0:
        if how == "a mesh":
            init_device_mesh("cpu", (2,))
        elif how == "gloo":
            dist.all_reduce(torch.ones(2))
        else:
            all_reduce(torch.ones(2), comm_over((0, 1)))


def _sends_and_returns() -> float:
    received = torch.zeros(1 << 20)
    if dist.get_rank() == 1:
        dist.send(received + 1, 0)
    else:
        time.sleep(0.5)
        dist.recv(received, 1)
    return received.sum().item()


@pytest.mark.parametrize("how", ["gloo", "shared memory", "a mesh"])
def test_a_rank_that_waits_for_one_that_has_returned_is_named(how: str) -> None:
    start = time.monotonic()
    with pytest.raises(
        RankError, match="_waits_for_the_others failed on rank 0 of 2; rank 1 had returned"
    ):
        launch(_waits_for_the_others, 2, how)
    assert time.monotonic() - start < 40  # starting ranks included


def test_a_rank_may_return_before_others_have_what_it_sent() -> None:
    assert launch(_sends_and_returns, 2) == [float(1 << 20), 0.0]


ARGUMENTS = """
    import sys
    from shoal_mesh import launch

    def given():
        return sys.argv[1:]

    if __name__ == "__main__":
        sys.argv += ["--steps", "3"]
        print(launch(given, 2))
"""
AT_IMPORT = """
    from shoal_mesh import launch
    import os

    def pid():
        return os.getpid()

    launch(pid, 2)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[str]]:
    """What each script prints."""
    started = {
        "arguments": (ARGUMENTS,),
        "at import": (AT_IMPORT,),
        "alone": (SCRIPT,),
        "torchrun": (SCRIPT, *TORCHRUN),
    }
    folder = tmp_path_factory.mktemp("scripts")
    return two_at_a_time(
        run_script, {name: (folder / name, *args) for name, args in started.items()}
    )


def test_ranks_have_the_arguments_of_the_script(scripts: dict[str, Future[str]]) -> None:
    assert scripts["arguments"].result() == "[['--steps', '3'], ['--steps', '3']]\n"


def test_a_script_that_launches_when_it_is_imported(scripts: dict[str, Future[str]]) -> None:
    with pytest.raises(
        AssertionError, match="put what starts them under `if __name__ == '__main__':`"
    ):
        scripts["at import"].result()


def test_from_a_program() -> None:
    assert launch(_total, 2, 1.0, scale=2.0) == [6.0, 6.0]
    with pytest.raises(ValueError, match="no such file") as caught:
        launch(_all_refuse, 2, "no such file")
    assert "failed on ranks 0, 1" in caught.value.__notes__[0]
    with pytest.raises(RankError, match="rank 1"):
        launch(_one_refuses, 2)
    with pytest.raises(MeshError, match="number of ranks"):
        launch(_total)  # type: ignore[call-overload]  # arguments are checked against the function


def _fails_on_rank_two(width: int) -> None:
    batch, names = torch.ones(width), {f"parameter {i}": torch.ones(width) for i in range(width)}
    all_reduce(batch, comm_over(range(4)))
    if dist.get_rank() == 2:
        raise ValueError("the batch of rank 2 is bad\n" + "\n".join(names))
    all_reduce(batch, comm_over(range(4)))


# it printed 20,227 characters, with the reason in line 19
def test_a_failure_is_short_and_ends_with_the_reason() -> None:
    with pytest.raises(RankError) as caught:
        launch(_fails_on_rank_two, 4, 30)
    heading, *rest = str(caught.value).split("\n--- ")
    named = re.search(r"output: (\S+)\)", heading)
    assert heading.startswith("_fails_on_rank_two failed on ranks 0-3 of 4") and named
    assert [paragraph.partition(" ---\n")[0] for paragraph in rest] == ["ranks 0, 1, 3", "rank 2"]
    assert all(len(paragraph.splitlines()) <= 10 for paragraph in rest)
    assert "rank 2 raised ValueError: the batch of rank 2 is bad" in rest[0]
    assert "the batch of rank 2 is bad" in rest[1] and rest[1].endswith(" more lines")
    assert isinstance(caught.value.__cause__, ValueError)
    whole = Path(named[1]).read_text()
    assert "parameter 29" in whole and "variables of _fails_on_rank_two" in whole
    assert Path(named[1]).stat().st_mode & 0o77 == 0
    with pytest.raises(ValueError, match="no such file") as alike:
        launch(_all_refuse, 3, "no such file")
    (note,) = alike.value.__notes__
    assert note.endswith("ValueError: no such file") and note.count("raise ValueError") == 1
    # of the last failure only
    assert not Path(named[1]).exists()


def test_arguments_that_a_function_does_not_take_are_refused_before_ranks_start() -> None:
    with pytest.raises(TypeError, match=r"_total, which does not take them: write"):
        launch(_total, 2, args=(1.0,))  # type: ignore[call-overload]  # refused
    with pytest.raises(MeshTypeError, match="missing a required argument: 'start'"):
        launch(_total, 2)  # type: ignore[call-overload]  # refused


def _nested(wrong: bool) -> list[int]:
    return launch(dist.get_rank, 3 if wrong else None)


@on_ranks(2)
def test_where_ranks_are_there_already() -> None:
    assert _nested(wrong=False) == [0, 1]
    with pytest.raises(MeshError, match="asked for 3 ranks"):
        _nested(wrong=True)


def test_from_a_script(scripts: dict[str, Future[str]]) -> None:
    out = scripts["alone"].result()
    assert "[20, 20]" in out
    assert "printed on 0" in out
    assert "printed on 1" in out


def test_under_torchrun(scripts: dict[str, Future[str]]) -> None:
    assert scripts["torchrun"].result().count("[20, 20]") == 2


def test_the_fake_world_is_a_world_of_present_ranks() -> None:
    with fake_world(1):
        assert launch(len, 1, "abc") == [3]
