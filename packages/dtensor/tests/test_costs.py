"""Covers: redistribute/search/{links,edges}.py: links, and the cost of a step."""

from __future__ import annotations

import pytest

from shoal_dtensor.redistribute.search.edges import sent_among
from shoal_dtensor.redistribute.search.links import COPY_SPEEDUP, Links, axes_of, mask_of

# a fast axis of 8 ranks, a slow one of 4
LINKS = Links((8, 4), (1e-6, 1e-5), (400e9, 50e9))


def test_a_collective_over_several_axes_runs_at_the_pace_of_the_slowest() -> None:
    fast, slow = mask_of((0,)), mask_of((1,))
    assert (LINKS.ranks(0), LINKS.ranks(fast), LINKS.ranks(fast | slow)) == (1, 8, 32)
    assert LINKS.seconds(fast, 400e3) == pytest.approx(2e-6)
    assert LINKS.seconds(fast | slow, 400e3) == LINKS.seconds(slow, 400e3) == pytest.approx(1.8e-5)


def test_a_mask_has_one_bit_for_each_axis() -> None:
    assert axes_of(mask_of((5, 0, 2))) == (0, 2, 5)
    assert (mask_of(()), axes_of(0)) == (0, ())


def test_copies_that_take_less_than_a_hundredth_of_a_collective_are_free() -> None:
    bandwidth = COPY_SPEEDUP * 400e9
    assert LINKS.copy(0.9e-8 * bandwidth) == 0.0
    assert LINKS.copy(1.1e-8 * bandwidth) == pytest.approx(1.1e-8)
    assert Links((), (), ()).copy(1e9) > 0.0


@pytest.mark.parametrize(
    ("ranks", "copies", "before", "received", "sent"),
    [
        # one taker for everything a rank has: it sends all of it
        (4, 1, 100, 75, 100),
        # each of four wants it: what an all-gather's busiest rank sends
        (4, 4, 100, 300, 400),
        # no rank sends more than all that the others lack
        (2, 8, 100, 50, 50),
    ],
)
def test_the_busiest_sender(ranks: int, copies: int, before: int, received: int, sent: int) -> None:
    assert sent_among(ranks, copies, before, received) == sent
