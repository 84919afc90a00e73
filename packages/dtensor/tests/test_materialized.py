"""Covers: modules/materialized.py."""

from __future__ import annotations

import pytest

from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import check_materialized


def test_parameters_on_the_meta_device_are_named_with_the_cure() -> None:
    check_materialized("f", [])
    with pytest.raises(
        StyleError, match=r"^f: parameters or buffers \['a', 'b'\] are on .*to_empty\(device="
    ):
        check_materialized("f", ["a", "b"])
