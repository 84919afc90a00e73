"""Objects of a thread are counted once, in every torch.

Covers: _torch.py (thread_object, set_thread_object).
"""

from __future__ import annotations

import sys

from shoal_mesh._torch import set_thread_object, thread_object


def test_an_object_that_a_thread_held_keeps_its_count() -> None:
    held = object()
    before = sys.getrefcount(held)
    for _ in range(20):
        set_thread_object("shoal_mesh.test", held)
        assert thread_object("shoal_mesh.test") is held
        set_thread_object("shoal_mesh.test", None)
    assert thread_object("shoal_mesh.test") is None
    assert sys.getrefcount(held) == before
