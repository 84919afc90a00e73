"""Comparison of the dropout masks of ranks.

Ranks with equal inputs must have equal masks, and ranks with different inputs different masks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..records import RankRecord
from .explanations import CertificationFinding, FittingExplanation
from .grid import MeshGrid

# masks with more random bits than this are not equal by chance
_BITS = 16.0


def compare_masks(ranks: Sequence[RankRecord], grid: MeshGrid) -> list[CertificationFinding]:
    """Compare the masks of ranks that differ on one axis.

    Args:
        ranks: records in the order of the ranks.
        grid: axes of the ranks.
    """
    findings = list[CertificationFinding]()
    for axis in grid.names:
        for group in grid.groups((axis,)):
            findings += _compare_group([ranks[rank] for rank in group], axis)
    unique = dict[tuple[str, str], CertificationFinding]()
    for finding in findings:
        unique.setdefault((finding.name, finding.explanations[0].text), finding)
    return list(unique.values())


def _compare_group(records: Sequence[RankRecord], axis: str) -> list[CertificationFinding]:
    """Compare the masks of the ranks of one group, each rank with the first one."""
    findings = list[CertificationFinding]()
    first = records[0]
    for record in records[1:]:
        # With shoal, dropout draws the masks of one device on any mesh, so ranks need no
        # comparison. Ranks with different numbers of dropouts cannot be compared one by one.
        if first.uses_shoal or record.uses_shoal or len(first.masks) != len(record.masks):
            continue
        # These are about the dropouts whose inputs differ on the two ranks: the sum of their random
        # bits, whether the ranks have equal masks in all of them, and the module of the first one.
        bits = 0.0
        are_alike = True
        place = ""
        for one, other in zip(first.masks, record.masks, strict=True):
            # `values` is the fingerprint of the dropout's input, `mask` the fingerprint of its
            # mask.
            name, size = _split(one.place)
            if one.values == other.values and one.mask != other.mask:
                text = f"dropout differs over {axis}, whose ranks have equal inputs"
                explanation = FittingExplanation("random", (axis,), text)
                # A record of a mask has no step, so the finding is of step 0. A mask is right or
                # wrong as a whole, so the difference is 1.
                findings.append(
                    CertificationFinding(0, "dropout", name, 1.0, explanations=(explanation,))
                )
                # The dropouts before this one are still judged below.
                break
            if one.values != other.values:
                bits += size
                are_alike = are_alike and one.mask == other.mask
                place = place or name
        if bits > _BITS and are_alike:
            text = f"dropout alike on all ranks of {axis}, whose inputs differ"
            explanation = FittingExplanation("random", (axis,), text)
            findings.append(
                CertificationFinding(0, "dropout", place, 1.0, explanations=(explanation,))
            )
    return findings


def _split(place: str) -> tuple[str, float]:
    """Return the module and the number of random bits of a place such as `mlp.drop (96)`."""
    name, _, bits = place.rpartition(" (")
    return name, float(bits.rstrip(")"))
