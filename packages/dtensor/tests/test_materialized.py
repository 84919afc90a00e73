"""Covers: modules/materialized.py."""

from __future__ import annotations

import pytest
import torch

from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import check_initialized, check_materialized, has_no_values


def test_parameters_on_the_meta_device_are_named_with_the_cure() -> None:
    check_materialized("f", [])
    with pytest.raises(
        StyleError, match=r"^f: parameters or buffers \['a', 'b'\] are on .*to_empty\(device="
    ):
        check_materialized("f", ["a", "b"])


def test_parameters_that_nothing_has_initialized_are_named_with_the_cure() -> None:
    unset = {
        "a": torch.full((2,), torch.nan),
        "b": torch.tensor([torch.nan, 1.0]),
        "c": torch.ones(0),
    }
    names = [name for name, tensor in unset.items() if has_no_values(tensor)]
    with pytest.raises(StyleError, match=r"^f: parameters \['a'\] have memory but no values"):
        check_initialized("f", names)
    check_initialized("f", [])
