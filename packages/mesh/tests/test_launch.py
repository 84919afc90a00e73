"""Covers: launch.py: from programs, scripts, under torchrun."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import MeshError, all_reduce, init_device_mesh, launch
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


ARGUMENTS = """
    import sys
    from shoal_mesh import launch

    def given():
        return sys.argv[1:]

    if __name__ == "__main__":
        sys.argv += ["--steps", "3"]
        print(launch(given, 2))
"""
SPAWNS = """
    import multiprocessing
    import torch.distributed as dist
    from shoal_mesh import launch

    def tell(rank, queue):
        queue.put(10 + rank)

    def spawned():
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=tell, args=(dist.get_rank(), queue))
        process.start()
        process.join()
        return process.exitcode, None if queue.empty() else queue.get()

    if __name__ == "__main__":
        print(launch(spawned, 2))
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
        "spawns": (SPAWNS,),
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


# as torch's checkpoints in a process of their own do
def test_ranks_spawn_processes_of_the_script(scripts: dict[str, Future[str]]) -> None:
    assert scripts["spawns"].result() == "[(0, 10), (0, 11)]\n"


def test_a_script_that_launches_when_it_is_imported(scripts: dict[str, Future[str]]) -> None:
    with pytest.raises(
        AssertionError,
        match="put the code that starts the ranks under `if __name__ == '__main__':`",
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
