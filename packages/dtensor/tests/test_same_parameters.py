"""Comparison of the parameters of all ranks.

Covers: modules/same_parameters.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal_dtensor.internal import check_same_parameters
from shoal_mesh import CommDebugMode, LockstepError, init_device_mesh
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_the_first_difference_is_named_on_all_ranks_of_a_mesh_of_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    is_other = mesh.get_coordinate() == (1, 0)
    bias = torch.ones(3 if is_other else 2)
    parameters: list[tuple[str, Tensor]] = [("weight", torch.ones(2, 2)), ("bias", bias)]
    message = r"f: all ranks .* on ranks \[0, 1, 3\]; bias: \(3,\) .* on ranks \[2\]"
    with pytest.raises(LockstepError, match=message):
        check_same_parameters("f", parameters, mesh, "ranks")
    # the groups work, and equal parameters take one message
    with CommDebugMode() as mode:
        check_same_parameters("f", parameters[:1], mesh, "ranks")
    assert mode.get_total_counts() == 1


@on_ranks(2)
def test_no_parameters_are_equal_to_no_parameters() -> None:
    mesh = init_device_mesh("cpu", (2,))
    check_same_parameters("f", [], mesh, "ranks")
    one_more = [("weight", torch.ones(1))] if mesh.get_rank() else []
    with pytest.raises(LockstepError, match=r"no parameter on ranks \[0\]; weight: \(1,\)"):
        check_same_parameters("f", one_more, mesh, "ranks")
