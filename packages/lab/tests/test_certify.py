"""Programs are certified.

Covers: certify.py, certification.py, report.py, records.py, pytest_fixture.py, analysis/forward.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hand_written_bugs as hand
from hand_written import average, batch, make_axes, rows
from shoal_lab import (
    CertificationReport,
    CertifyError,
    CertifyTypeError,
    NotCertifiedError,
    certify,
)

# An installation registers this fixture.
from shoal_lab.pytest_fixture import certified as certified

WIDTH = 8


def train(
    mesh: Mapping[str, int], layers: int = 2, width: int = WIDTH, divides: bool = True
) -> Any:
    """Train a stack of layers with data parallelism."""
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    for step in range(2):
        loss = model(rows(batch(step, 8, width), dp)).square().mean()
        loss.backward()
        average(model.parameters(), dp, None if divides else 1)
        optimizer.step()
        optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss, group=dp.group)
    return {"loss": loss / dp.size}


def train_wrong(mesh: Mapping[str, int], layers: int = 2, width: int = WIDTH) -> None:
    """Forget to divide."""
    train(mesh, layers, width, divides=False)


class Reference(nn.Module):
    """The same stack under other names."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


def train_alone(layers: int = 2, width: int = WIDTH) -> Any:
    """Train on one device, without a process group."""
    torch.manual_seed(1)
    model = Reference(layers, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    for step in range(2):
        loss = model(batch(step, 8, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss.detach()}


def test_a_reference_with_other_names_is_matched_by_values() -> None:
    report = certify(train, train_alone, meshes=[{"dp": 2}, {"dp": 4}])
    assert report.passed, str(report)
    assert [result.compared for result in report.results] == [21, 21]
    wrong = certify(train_wrong, train_alone, meshes=[{"dp": 2}], shrink=False)
    assert {finding.name for finding in wrong.findings} == {
        f"layers.{number}.{leaf}" for number in range(2) for leaf in ("weight", "bias")
    }


def test_a_reference_may_take_the_mesh() -> None:
    assert certify(train, train, meshes=[{"dp": 2}]).passed


def test_sizes_reach_both_programs_and_are_halved_after_a_failure() -> None:
    report = certify(train_wrong, train_alone, meshes=[{"dp": 4}], sizes={"layers": 2, "width": 8})
    assert "4 times too large: mean taken as sum over dp" in str(report)
    # A matrix of one element is constant, so no name of the reference can be found by its value.
    assert "meshes=[{'dp': 2}], sizes={'layers': 1, 'width': 2})" in report.smallest
    assert "def train_wrong(mesh" in report.smallest
    # two layers of two parameters, and of none of them anything that is right
    assert len(report.findings) == 4


def test_nothing_is_shrunk_where_that_is_not_asked_for() -> None:
    assert certify(train_wrong, meshes=[{"dp": 4}], shrink=False).smallest == ""


def test_the_tolerance_is_that_of_the_caller() -> None:
    assert certify(train_wrong, meshes=[{"dp": 2}], tolerance=10.0).passed


def test_the_dtype_of_both_runs_may_be_that_of_torch() -> None:
    report = certify(train, meshes=[{"dp": 2}], dtype="")
    assert report.passed
    assert report.results[0].tolerance == pytest.approx(1e-4)


def test_a_returned_value_must_be_whole_on_every_rank() -> None:
    report = certify(local_loss, meshes=[{"dp": 2}])
    (finding,) = report.findings
    assert "<td>1 differ from one device</td>" in report._repr_html_()
    assert repr(report) == str(report)
    assert (finding.quantity, finding.name, finding.axes) == ("returned value", "loss", ("dp",))
    assert "right after a mean over dp" in finding.sentence()


def local_loss(mesh: Mapping[str, int]) -> Any:
    """Return the loss of this rank's rows."""
    dp = make_axes(mesh)["dp"]
    return {"loss": rows(batch(0, 8, WIDTH), dp).square().mean()}


def test_the_fixture_fails_a_test_with_the_report(
    certified: Callable[..., CertificationReport],
) -> None:
    report = certified(train, meshes=[{"dp": 2}])
    assert report.passed and "<td>equal to one device</td>" in report._repr_html_()
    with pytest.raises(NotCertifiedError, match="mean taken as sum over dp"):
        certified(train_wrong, meshes=[{"dp": 2}])


def test_the_first_module_that_differs_is_named() -> None:
    report = certify(hand.no_reduce_after_row_parallel, meshes=[{"dp": 1, "tp": 2}], shrink=False)
    assert report.results[0].first_module == (
        "step 0: output of 0: missing all-reduce over tp after 0.down, whose output is right after "
        "a sum over tp"
    )


def forgets_a_step(mesh: Mapping[str, int]) -> None:
    """Step twice on one device, once on ranks."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2 if mesh["dp"] == 1 else 1):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_another_number_of_steps_is_a_finding() -> None:
    report = certify(forgets_a_step, meshes=[{"dp": 2}], shrink=False)
    assert "the optimizer stepped 1 times on the ranks, but 2 times on one device" in str(report)


_MESHES = list[Any]()


def destroys_its_groups(mesh: Mapping[str, int]) -> None:
    """Sum gradients over the axis of a sliced mesh, and destroy the groups at the end."""
    grid = init_device_mesh("cpu", (mesh["data"], 1), mesh_dim_names=("data", "other"))
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    _MESHES.append(grid["other"])
    rows = torch.arange(8.0).view(4, 2).chunk(mesh["data"])[dist.get_rank()]
    layer(rows).square().mean().backward()
    for parameter in layer.parameters():
        dist.all_reduce(parameter.grad, group=grid["data"].get_group())
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    dist.destroy_process_group()


def test_axes_are_known_after_the_groups_are_destroyed() -> None:
    report = certify(destroys_its_groups, meshes=[{"data": 2}], shrink=False)
    assert "2 times too large: mean taken as sum over data" in str(report)


def fails_alone(mesh: Mapping[str, int]) -> None:
    """Raise on one device."""
    if mesh["dp"] == 1:
        raise RuntimeError("needs two ranks")


def fails_on_ranks(mesh: Mapping[str, int]) -> None:
    """Raise on all ranks."""
    raise LookupError("no such data")


def test_errors_of_the_program_are_raised() -> None:
    with pytest.raises(
        CertifyError, match=r"ran on the ranks, but not on one device: .*needs two ranks"
    ):
        certify(fails_alone, meshes=[{"dp": 2}])
    with pytest.raises(LookupError, match="no such data"):
        certify(fails_on_ranks, meshes=[{"dp": 2}])


def does_nothing(mesh: Mapping[str, int]) -> None:
    """Train nothing."""


def test_a_program_without_values_is_not_certified() -> None:
    with pytest.raises(CertifyError, match="nothing could be compared"):
        certify(does_nothing, meshes=[{"dp": 2}])


@pytest.mark.parametrize(
    ("program", "meshes", "error", "text"),
    [
        (train, [], CertifyError, "meshes is empty"),
        (train, [{"dp": 0}], CertifyError, "must be positive"),
        (train, {"dp": 2}, CertifyTypeError, "expected meshes to be a list of dicts"),
        (3, [{"dp": 2}], CertifyTypeError, "a function or the path of a script, got int"),
        ("no.py", [{"dp": 2}], CertifyError, r"the script no\.py does not exist"),
    ],
)
def test_wrong_arguments_are_refused(
    program: Any, meshes: Sequence[Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        certify(program, meshes=meshes)


def test_a_reference_must_be_a_function() -> None:
    with pytest.raises(CertifyTypeError, match="reference is a function, got int"):
        certify(train, 3, meshes=[{"dp": 2}])  # type: ignore[arg-type]  # the error is tested
