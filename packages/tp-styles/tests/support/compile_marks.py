"""Marks of all tests of compiled modules: `pytestmark = COMPILED`."""

from __future__ import annotations

import pytest
import torch

COMPILED = [
    pytest.mark.skipif(
        torch.__version__ < "2.12",
        reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
    ),
    # All are torch's own: while it traces any autograd function, any cached one, and any input that
    # is not a leaf.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
