"""Plans: styles by module path.  Resolving and checking one needs no process group and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shoal_dtensor import Placement, Replicate
from shoal_mesh import DeviceMesh

from .errors import LayoutError, PlanError, TiedWeightError
from .match import Tree
from .names import style_named
from .sharding import HeadCut, ModuleSharding
from .style import DeclaredStyle, ParallelStyle

__all__ = ["Plan", "Resolved", "Use", "axis_mesh", "resolve"]

Plan = ParallelStyle | str | Mapping[str, ParallelStyle | str]


@dataclass(frozen=True, slots=True)
class Use:
    """One style on one module.

    Attributes:
        key: the plan's entry.
        path: path of the module from the root.
        module: the module.
        style: the style.
        sharding: what the style declares for it; None for styles that only know how to apply themselves.
    """

    key: str
    path: str
    module: nn.Module
    style: ParallelStyle
    sharding: ModuleSharding | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plan on a module.

    Attributes:
        root: the module.
        uses: styles on modules, in the plan's order.
        unmatched: one message per entry that matches no module.
    """

    root: nn.Module
    uses: tuple[Use, ...]
    unmatched: tuple[str, ...]

    def ambiguous(self) -> list[str]:
        """Modules whose parameters two entries would shard."""
        first: dict[int, Use] = {}
        problems = []
        for use in self.uses:
            if use.sharding is not None and not use.sharding.distributes:
                continue
            before = first.setdefault(id(use.module), use)
            if before is not use:
                problems.append(
                    f"module {use.path!r} is sharded by two entries: {before.key!r} ({before.style}) and "
                    f"{use.key!r} ({use.style})"
                )
        return problems

    def tied_conflicts(self) -> list[str]:
        """Shared parameters that would lie in two ways, or of which one owner has no style."""
        asked = self._placements()
        problems = []
        for names in shared_parameters(self.root):
            known = {name: asked.get(name) for name in names}
            if len(set(known.values())) > 1:
                told = ", ".join(
                    f"{name}: {place if place is not None else 'no style'}" for name, place in known.items()
                )
                problems.append(f"one parameter shared under {len(names)} names must lie one way ({told})")
        return problems

    def _placements(self) -> dict[str, tuple[Placement | HeadCut, str | int | None]]:
        asked: dict[str, tuple[Placement | HeadCut, str | int | None]] = {}
        for use in self.uses:
            if use.sharding is None or not use.sharding.distributes:
                continue
            for name, _ in use.module.named_parameters(remove_duplicate=False):
                path = f"{use.path}.{name}" if use.path else name
                asked[path] = use.sharding.parameters.get(name, Replicate()), use.style.axis
        return asked

    def check(self) -> None:
        """Raise what would otherwise show only while applying.

        Raises:
            PlanError: if two entries shard one module.
            TiedWeightError: if a shared parameter would lie in two ways.
        """
        for problem in self.ambiguous():
            raise PlanError(problem)
        if any(use.sharding is None for use in self.uses):
            return  # a style of the user's own may do anything with parameters
        for problem in self.tied_conflicts():
            raise TiedWeightError(problem)


def shared_parameters(root: nn.Module) -> list[list[str]]:
    """Groups of names under which one parameter is held."""
    names: dict[int, list[str]] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def resolve(root: nn.Module, plan: Plan) -> Resolved:
    """Which style falls on which module.

    Raises:
        TypeError: if the plan is neither a style nor a mapping from paths to styles.
        UnsupportedModuleError: if a style cannot shard a module that it falls on.
    """
    if isinstance(plan, (ParallelStyle, str)):
        plan = {"": plan}
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"a plan is a ParallelStyle or a dict of module path -> ParallelStyle, got {type(plan).__name__}"
        )
    modules = dict(root.named_modules(remove_duplicate=False))
    tree = Tree.of(modules)
    uses: list[Use] = []
    unmatched: list[str] = []
    seen: set[tuple[int, int]] = set()
    for number, (key, value) in enumerate(plan.items()):
        style = _style(key, value)
        match = tree.match(key)
        if match.token is not None:
            where = f"{match.reached!r} ({type(modules[match.reached]).__name__})" if match.reached else "the root"
            unmatched.append(
                f"plan entry {key!r} matches no module of {type(root).__name__}: "
                f"no child of {where} matches {match.token!r}"
            )
        for path in match.paths:
            # A module that hangs in the tree under several names is made parallel once.
            if style is not None and (number, id(modules[path])) not in seen:
                seen.add((number, id(modules[path])))
                uses.append(_use(key, path, modules[path], style))
    return Resolved(root, tuple(uses), tuple(unmatched))


def _style(key: str, value: object) -> ParallelStyle | None:
    if not isinstance(key, str):
        raise TypeError(f"a plan's keys are module paths, got {type(key).__name__} {key!r}")
    if isinstance(value, str):
        return style_named(value)
    if not isinstance(value, ParallelStyle):
        raise TypeError(f"plan entry {key!r}: expected a ParallelStyle or the name of one, got {type(value).__name__}")
    return value


def _use(key: str, path: str, module: nn.Module, style: ParallelStyle) -> Use:
    sharding = style.sharding(module) if isinstance(style, DeclaredStyle) else None
    return Use(key, path, module, style, sharding)


def axis_mesh(mesh: DeviceMesh, style: ParallelStyle) -> DeviceMesh:
    """The one-axis mesh on which a style acts.

    Raises:
        LayoutError: if the mesh has several axes and the style names none, or one that is not there.
    """
    axes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    if style.axis is None:
        if mesh.ndim == 1:
            return mesh
        raise LayoutError(
            f"{style}: the mesh has axes {axes}; say which one the style uses: style.on({mesh.axis_names[-1]!r})"
        )
    name = mesh.axis_names[style.axis] if isinstance(style.axis, int) and style.axis < mesh.ndim else style.axis
    if name not in axes:
        raise LayoutError(f"{style}: the mesh has axes {axes}, the style names {style.axis!r}")
    return mesh if mesh.ndim == 1 else mesh[name]
