"""`WeightMapping`: where each element of each target tensor comes from, for a whole model.

A mapping has assignments that define each target element exactly once. `same_names` makes a
mapping, edits such as `fuse` and `split` return a changed one, and `then` composes two.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import MappingError
from . import edits
from .assignment import Assignment
from .edits import Edit, Shapes, copy_of
from .regions import (
    count_elements,
    first_gap,
    first_overlap,
    format_region,
    intersect_regions,
    whole_region,
)

_FORMAT = "shoal-weight-mapping"
_VERSION = 1


@dataclass(frozen=True)
class WeightMapping:
    """The elements of target tensors as elements of source tensors.

    A mapping is data: JSON without tensors. It defines each element of each target tensor exactly
    once, which `check` proves. It does not say which rank holds an element; manifests do.

    Args:
        sources: shapes of the source tensors by name.
        targets: shapes of the target tensors by name.
        assignments: regions of targets and their sources, in any order.
        witness: how the mapping was found to be right, for example "recorded loader"; None if it
            was not checked.
        computed: the name of a function by the name of a target. The receiver computes each element
            of the target by the function from the element that arrives. `WeightTransfer` gets the
            functions by these names.

    Attributes:
        by_target: the assignments of each target tensor.

    Example:
        >>> shapes = {"q": (4, 8), "k": (2, 8), "v": (2, 8)}
        >>> fused = WeightMapping.same_names(shapes).fuse({"qkv": ("q", "k", "v")})
        >>> fused.targets
        {'qkv': (8, 8)}
        >>> fused.by_target["qkv"][1]
        Assignment('qkv'[4:6, 0:8] = 'k'[0:2, 0:8])
    """

    sources: Shapes
    targets: Shapes
    assignments: tuple[Assignment, ...]
    witness: str | None = None
    computed: Mapping[str, str] = field(default_factory=dict)
    by_target: Mapping[str, tuple[Assignment, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        grouped = defaultdict[str, list[Assignment]](list)
        for assignment in self.assignments:
            grouped[assignment.target].append(assignment)
        by_target = {name: tuple(parts) for name, parts in grouped.items()}
        object.__setattr__(self, "by_target", by_target)

    @classmethod
    def same_names(cls, shapes: Mapping[str, Iterable[int]]) -> WeightMapping:
        """Return the mapping of tensors to themselves.

        It does not have a witness: two models may order the elements of a name differently.

        Args:
            shapes: the shapes by name.

        Example:
            >>> WeightMapping.same_names({"bias": (3,)}).assignments
            (Assignment('bias'[0:3] = 'bias'[0:3]),)
        """
        fixed = {name: tuple(shape) for name, shape in shapes.items()}
        copies = (copy_of(name, name, shape) for name, shape in fixed.items())
        return cls(fixed, fixed, tuple(copies))

    def check(self) -> None:
        """Check that regions are in their tensors and define each target element exactly once.

        Raises:
            MappingError: the message names the tensor and the region.
        """
        for name in self.by_target.keys() - self.targets.keys():
            raise MappingError(f"the mapping assigns to {name!r}, which is not one of its targets")
        for name, shape in self.targets.items():
            parts = self.by_target.get(name, ())
            for part in parts:
                part.check(shape, self.sources.get(part.source or ""))
            _check_cover(name, shape, parts)
        for name in self.computed:
            for part in self.by_target.get(name, ()):
                if part.source is None:
                    raise MappingError(
                        f"{part}: {self.computed[name]!r} computes the elements of {name!r}, which "
                        "need a source"
                    )

    def then(self, later: WeightMapping) -> WeightMapping:
        """Compose two mappings: the targets of this one are the sources of the later one.

        Args:
            later: a mapping from target tensors of this mapping.

        Returns:
            A mapping from the sources of this one to the targets of the later one. It has a
            witness if both have one.

        Raises:
            MappingError: the later mapping reads a tensor, a shape or an element that this one
                does not define.

        Example:
            >>> stacked = WeightMapping.same_names({"w": (2, 3, 4)})
            >>> named = stacked.unstack({"w": "experts.{index}.w"})
            >>> named.rename({"^experts": "mlp"}).assignments[1]
            Assignment('mlp.1.w'[0:3, 0:4] = 'w'[1:2, 0:3, 0:4] along (1, 2))
        """
        for name, shape in later.sources.items():
            if self.targets.get(name, shape) != shape:
                raise MappingError(
                    f"{name!r} is {shape} in the later mapping, but {self.targets[name]} in this "
                    "one"
                )
        composed: list[Assignment] = []
        for assignment in later.assignments:
            composed += self._compose_before(assignment)
        witnesses = (self.witness, later.witness)
        witness = None if None in witnesses else f"{self.witness}, then {later.witness}"
        computed = self._computed_after(later)
        return WeightMapping(
            self.sources, later.targets, tuple(composed), witness, computed=computed
        )

    def _computed_after(self, later: WeightMapping) -> dict[str, str]:
        """Return the computed targets of the composition of this mapping with a later one.

        These are the later mapping's own, and targets that it moves from computed targets of this
        mapping.
        """
        computed = dict(later.computed)
        for name, parts in later.by_target.items():
            functions = {self.computed.get(part.source or "") for part in parts}
            if functions == {None}:
                continue
            computed_later = later.computed.get(name)
            if len(functions) > 1 or computed_later is not None:
                names = sorted({str(one) for one in (*functions, computed_later)})
                raise MappingError(
                    f"{name!r} is made of elements of different computations, {', '.join(names)}; "
                    "compute tensors as the server has them"
                )
            computed[name] = str(functions.pop())
        return computed

    def _compose_before(self, later: Assignment) -> list[Assignment]:
        """Return the assignments from the sources of this mapping that make up a later one."""
        if later.source is None:
            return [later]
        parts = []
        for earlier in self.by_target.get(later.source, ()):
            part = later.after(earlier)
            if part is not None:
                parts.append(part)
        if sum(count_elements(part.region) for part in parts) != count_elements(later.region):
            raise MappingError(
                f"{later}: the earlier mapping does not define these elements exactly once"
            )
        return parts

    def witnessed_by(self, witness: str | None) -> WeightMapping:
        """Return the mapping with a note of how it was found to be right.

        Args:
            witness: for example "version 0: the base checkpoint, sent, gave the server's bytes".

        Example:
            >>> mapping = WeightMapping.same_names({"a": (2,)}).rename({"a": "b"})
            >>> mapping.witness, mapping.witnessed_by("version 0").witness
            (None, 'version 0')
        """
        return replace(self, witness=witness)

    def with_computed(self, functions: Mapping[str, str]) -> WeightMapping:
        """Return the mapping with targets that a function of the receiver computes after arrival.

        Args:
            functions: the name of the function by the name of the target; `{}` stands for one part
                of a name between dots.

        Raises:
            MappingError: a target does not exist.

        Example:
            >>> mapping = WeightMapping.same_names({"norm.weight": (2,), "w": (3,)})
            >>> mapping.with_computed({"norm.weight": "add 1"}).computed
            {'norm.weight': 'add 1'}
        """
        computed = dict(self.computed)
        for template, function in functions.items():
            for name in edits.matched_names(self.targets, [template]):
                computed[name] = function
        return replace(self, computed=computed)

    def with_casts(self, casts: bool = True) -> WeightMapping:
        """Return the mapping with each assignment allowed to change the dtype."""
        parts = (replace(part, casts=casts) for part in self.assignments)
        return replace(self, assignments=tuple(parts))

    # --- edits ---------------------------------------------------------------------------------

    def rename(self, patterns: Mapping[str, str]) -> WeightMapping:
        """Replace regular expressions in the names of targets.

        Args:
            patterns: replacements by pattern, as for `re.sub`; all are applied, in order.

        Raises:
            MappingError: two tensors get one name.

        Example:
            >>> WeightMapping.same_names({"model.w": (2,)}).rename({"^model[.]": ""}).targets
            {'w': (2,)}
        """
        return self._apply_edit(edits.edit_names(self.targets, patterns))

    def fuse(
        self, fused: Mapping[str, Sequence[str]], *, dim: int = 0, groups: int = 1
    ) -> WeightMapping:
        """Concatenate targets: q, k and v, or gate and up.

        Args:
            fused: names of the parts by the name of the fused tensor, in order; `{}` stands for
                one part of a name between dots.
            dim: the dim along which the parts are concatenated.
            groups: number of equal shares of each part. With 2, the fused tensor has the first
                halves of all parts, then the second halves. A tensor that is interleaved by head
                groups has as many groups as kv heads.

        Raises:
            MappingError: a part is missing, or its dim has no such groups.

        Example:
            >>> shapes = {"layers.0.gate": (2, 3), "layers.0.up": (2, 3)}
            >>> parts = {"layers.{}.gate_up": ("layers.{}.gate", "layers.{}.up")}
            >>> WeightMapping.same_names(shapes).fuse(parts).targets
            {'layers.0.gate_up': (4, 3)}
        """
        return self._apply_edit(edits.fuse(self.targets, fused, dim, groups))

    def split(
        self, blocks: Mapping[str, Mapping[str, int]], *, dim: int = 0, groups: int = 1
    ) -> WeightMapping:
        """Split targets into blocks; the inverse of `fuse`.

        Args:
            blocks: name of a fused tensor -> name of a block -> size of the block, in order.
            dim: the dim that is split.
            groups: as for `fuse`.

        Raises:
            MappingError: the sizes do not add up, or a block has no such groups.

        Example:
            >>> fused = WeightMapping.same_names({"kv": (4, 3)})
            >>> fused.split({"kv": {"k": 2, "v": 2}}, groups=2).by_target["v"]
            (Assignment('v'[0:1, 0:3] = 'kv'[1:2, 0:3]), Assignment('v'[1:2, 0:3] = 'kv'[3:4, 0:3]))
        """
        return self._apply_edit(edits.split(self.targets, blocks, dim, groups))

    def stack(self, stacked: Mapping[str, str]) -> WeightMapping:
        """Stack numbered targets along a new first dim: experts.

        Args:
            stacked: name of a stacked tensor -> name of its parts, with `{index}`.

        Example:
            >>> experts = WeightMapping.same_names({"e.0.w": (2,), "e.1.w": (2,)})
            >>> experts.stack({"w": "e.{index}.w"}).targets
            {'w': (2, 2)}
        """
        return self._apply_edit(edits.stack(self.targets, stacked))

    def unstack(self, stacked: Mapping[str, str]) -> WeightMapping:
        """Give each index of the first dim of targets a tensor of its own; the inverse of `stack`.

        Args:
            stacked: name of a stacked tensor -> name of its parts, with `{index}`.

        Example:
            >>> WeightMapping.same_names({"w": (2, 3)}).unstack({"w": "e.{index}.w"}).targets
            {'e.0.w': (3,), 'e.1.w': (3,)}
        """
        return self._apply_edit(edits.unstack(self.targets, stacked))

    def transpose(self, names: Iterable[str], *, dims: tuple[int, int] = (-2, -1)) -> WeightMapping:
        """Exchange two dims of targets.

        Args:
            names: names of the tensors; `{}` stands for one part of a name between dots.
            dims: the two dims.

        Example:
            >>> WeightMapping.same_names({"w": (2, 3)}).transpose(["w"]).targets
            {'w': (3, 2)}
        """
        return self._apply_edit(edits.transpose(self.targets, names, dims))

    def pad(
        self, sizes: Mapping[str, int], *, dim: int = 0, fill: float | None = 0.0
    ) -> WeightMapping:
        """Lengthen a dim of targets: a padded vocabulary.

        Args:
            sizes: the new size of the dim by name.
            dim: the dim.
            fill: the value of the new elements; None keeps the elements that the target has.

        Raises:
            MappingError: a tensor is longer than the new size.

        Example:
            >>> WeightMapping.same_names({"w": (2,)}).pad({"w": 4}).assignments[1]
            Assignment('w'[2:4] = 0.0)
        """
        return self._apply_edit(edits.pad(self.targets, sizes, dim, fill))

    def repeat(
        self, names: Iterable[str], *, times: int, block: int, dim: int = 0
    ) -> WeightMapping:
        """Repeat blocks of targets: kv heads for more ranks than there are heads.

        Args:
            names: names of the tensors.
            times: copies of each block, side by side.
            block: rows of a block: the size of a head.
            dim: the dim of the blocks.

        Raises:
            MappingError: the dim is not a multiple of the block.

        Example:
            >>> WeightMapping.same_names({"k": (4,)}).repeat(["k"], times=2, block=2).targets
            {'k': (8,)}
        """
        return self._apply_edit(edits.repeat(self.targets, names, times, block, dim=dim))

    def add_copies(self, copies: Mapping[str, str]) -> WeightMapping:
        """Add targets that are copies of other targets: a head tied to an embedding.

        Args:
            copies: the existing name by the new name.

        Example:
            >>> WeightMapping.same_names({"w": (2,)}).add_copies({"head": "w"}).assignments[0]
            Assignment('head'[0:2] = 'w'[0:2])
        """
        return self._apply_edit(edits.add_copies(self.targets, copies))

    def add_filled(self, shapes: Shapes, *, fill: float | None = None) -> WeightMapping:
        """Add targets without a source.

        Args:
            shapes: the shapes of the new targets by name.
            fill: the value of their elements; None keeps the elements that the target has.

        Example:
            >>> WeightMapping.same_names({}).add_filled({"scale": (1,)}, fill=1.0).assignments
            (Assignment('scale'[0:1] = 1.0),)
        """
        return self._apply_edit(edits.add_filled(self.targets, shapes, fill))

    def drop(self, names: Iterable[str]) -> WeightMapping:
        """Leave targets out.

        Args:
            names: names of the tensors.

        Example:
            >>> WeightMapping.same_names({"a": (2,), "b": (3,)}).drop(["a"]).targets
            {'b': (3,)}
        """
        return self._apply_edit(edits.drop(self.targets, names))

    def _apply_edit(self, edit: Edit) -> WeightMapping:
        return self.then(WeightMapping(self.targets, edit.targets, edit.assignments))

    # --- JSON ----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the mapping as a JSON text."""
        value: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "witness": self.witness}
        value["sources"] = dict(self.sources)
        value["targets"] = dict(self.targets)
        value["assignments"] = [part.to_json() for part in self.assignments]
        if self.computed:
            value["computed"] = dict(self.computed)
        return json.dumps(value)

    @classmethod
    def from_json(cls, text: str) -> WeightMapping:
        """Return the mapping that `to_json` has written.

        Raises:
            MappingError: the text is not a mapping, has another version, or lacks a part.
        """
        try:
            return cls._from_value(json.loads(text))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            if isinstance(error, MappingError):
                raise
            raise MappingError(f"not a mapping: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_value(cls, value: Any) -> WeightMapping:
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise MappingError(f"expected JSON of format {_FORMAT!r}")
        if value["version"] != _VERSION:
            raise MappingError(
                f"cannot read version {value['version']} of a mapping; this release reads version "
                f"{_VERSION}"
            )
        sources = {name: tuple(shape) for name, shape in value["sources"].items()}
        targets = {name: tuple(shape) for name, shape in value["targets"].items()}
        assignments = tuple(map(Assignment.from_json, value["assignments"]))
        computed = value.get("computed", {})
        return cls(sources, targets, assignments, value["witness"], computed=computed)


def _check_cover(name: str, shape: tuple[int, ...], parts: tuple[Assignment, ...]) -> None:
    """Check that the assignments define each element of a target tensor exactly once."""
    regions = [part.region for part in parts]
    twice = first_overlap(regions)
    if twice is not None:
        one, other = (parts[number] for number in twice)
        both = format_region(intersect_regions(one.region, other.region) or ())
        raise MappingError(f"{name!r} {shape}: {both} has two sources, {one} and {other}")
    if sum(map(count_elements, regions)) != count_elements(whole_region(shape)):
        gap = format_region(first_gap(regions, shape) or ())
        raise MappingError(
            f"{name!r} {shape}: {gap} does not have a source; assign a source, a fill value, or "
            "keep"
        )
