"""Resolution of a plan on a model: the style of each module.

Resolving and checking need no process group.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn

from shoal_dtensor import DTensor, Placement, Replicate, Shard, StridedShard
from shoal_dtensor.errors import LayoutError, PlanError, StyleError, StyleTypeError, TiedWeightError
from shoal_dtensor.internal import (
    Scatter,
    check_device_mesh,
    check_styled,
    given_back,
    in_turns,
    scattering,
    shard_sizes,
    watch_draws,
)
from shoal_mesh import DeviceMesh

from ..apply.apply import apply_sharding, check_parameters, conflicting_style, note_undeclared
from ..sharding.module_sharding import Adapter, ModuleSharding, ParameterPlacement
from ..styles.linear import style_of_tied
from ..styles.style import DeclaredStyle, ParallelStyle
from .wildcards import Tree

T = TypeVar("T")
Plan = ParallelStyle | str | Mapping[str, ParallelStyle | str]


# Reasons that a message has at most, and characters of each.
_REASONS = 6
_REASON = 200


class AutoPlan(dict[str, ParallelStyle]):
    """A plan of `auto_plan`: styles by path, and whether it is proven.

    Any change of the plan gives a plain dict.

    Attributes:
        proven_for: shape of the mesh on which a run computed the results of the plain model; None
            without such a run.
        dropped: entries that a run found to be wrong, each with the reason; the plan may have other
            entries in their place.
        whole: parameters that every rank holds whole, each with the reason.
    """

    proven_for: tuple[int, ...] | None = None
    dropped: Mapping[str, str] = MappingProxyType({})
    whole: Mapping[str, str] = MappingProxyType({})

    @property
    def why_empty(self) -> str:
        """Reasons why each module was left out of an empty plan, grouped by reason."""
        by_reason: dict[str, list[str]] = {}
        for path, reason in (self.dropped or self.whole).items():
            by_reason.setdefault(reason[:_REASON], []).append(path)
        lines = [f"{', '.join(paths)}: {reason}" for reason, paths in by_reason.items()]
        more = "" if len(lines) <= _REASONS else f"; and {len(lines) - _REASONS} more in `dropped`"
        return f"the plan is empty; modules were kept out: {'; '.join(lines[:_REASONS])}{more}"


class Use(NamedTuple):
    """The use of one style on one module."""

    key: str  # the plan's entry
    path: str  # path of the module from the root
    module: nn.Module  # the module
    style: ParallelStyle  # the style
    # what the style declares for it; None for styles that only have `_apply`
    sharding: ModuleSharding | None

    def shard_sizes(self, name: str, mesh: DeviceMesh) -> Iterator[tuple[str, str, int, list[int]]]:
        """Yield the sharding of a parameter along each axis that shards it.

        The items are the parameter's name, the dim in words, its elements, and the elements of each
        rank.
        """
        assert self.sharding is not None, "only declared styles are measured"
        fused = self.sharding.fused
        param = self.module.get_parameter(name)
        if fused is not None and name in fused.names:
            what = f"{len(fused.blocks)} blocks of {fused.features} rows"
            yield mesh.axis_names[0], what, fused.features, fused.rows(mesh.size())
            return
        placements = self.sharding.placements(name, mesh.shape)
        for axis, placement, ranks in zip(mesh.axis_names, placements, mesh.shape, strict=False):
            if isinstance(placement, Shard | StridedShard):
                size = param.shape[placement.dim]
                unit = placement.multiple_of if isinstance(placement, Shard) else 1
                what = f"dim {placement.dim} of {size}{f' (multiples of {unit})' * (unit > 1)}"
                yield axis, what, size, shard_sizes(size, placement, ranks)


class Resolved(NamedTuple):
    """A plan resolved on a module."""

    root: nn.Module  # the module
    uses: tuple[Use, ...]  # styles on modules, in the plan's order
    # one message per entry that matches no module
    unmatched: tuple[str, ...]

    def ambiguous(self) -> Iterable[str]:
        """Return parameters that two entries would shard, and boundaries wrapped twice.

        A module is wrapped twice if two entries have the same kind of boundary style.
        """
        owners: dict[tuple[int, str], Use] = {}
        clashes: dict[tuple[int, int], str] = {}  # one message for each pair of uses
        for use in self.uses:
            for key in _wrapped(use):
                first = owners.setdefault(key, use)
                if first is not use:
                    entries = f"{first.key!r} ({first.style}) and {use.key!r} ({use.style})"
                    clashes[id(first), id(use)] = (
                        f"module {use.path!r} is sharded by two entries: {entries}"
                    )
        return clashes.values()

    def tied_conflicts(self) -> Iterator[str]:
        """Yield shared parameters with two layouts, or with an owner that has no style."""
        reach = [use.module.named_modules() for use in self.uses if use.sharding is None]
        undeclared = {key for owners in reach for key, _, _ in _owned_parameters(owners)}
        for names, asked in _tied(self.root, self.uses):
            known = {path: asked[key][1] if key in asked else None for key, path in names.items()}
            # A style that only has `_apply` may give its modules other parameters: `apply` looks
            # once it has run.
            if len(set(known.values())) > 1 and undeclared.isdisjoint(names):
                layouts = ", ".join(
                    f"{path}: {layout or 'no style'}" for path, layout in known.items()
                )
                yield f"one parameter shared under {len(names)} names must have one layout ({layouts})"

    def errors(self) -> Iterator[StyleError]:
        """Yield the errors that prevent the plan from being applied."""
        for use in self.uses:
            style = use.sharding.style if use.sharding is not None else type(use.style).__name__
            distributes = use.sharding is not None and use.sharding.distributes
            problem = conflicting_style(use.module, style, use.path, distributes=distributes)
            if problem is not None:  # it has the style of an earlier call
                yield PlanError(problem)
        yield from map(PlanError, self.ambiguous())
        yield from map(TiedWeightError, self.tied_conflicts())

    def check(self) -> None:
        """Raise the first of the errors, before anything is applied."""
        for error in self.errors():
            raise error

    def apply(self, mesh: DeviceMesh, *, src_data_rank: int | None = 0, lower: bool = True) -> None:
        """Check the plan, then make every module parallel; change nothing if the check raises."""
        self.check()
        tied = [[*names.values()] for names, _ in _tied(self.root, self.uses)]
        shared = [{path: self.root.get_parameter(path) for path in paths} for paths in tied]
        styled = [(use, axis_mesh(mesh, use.style)) for use in self.uses]
        owners = [
            check_styled(use.module, axis)
            if use.sharding is None or use.sharding.distributes
            else []
            for use, axis in styled
        ]
        # New parameters, of adapters or of a style without a declaration, are drawn in the plan's
        # order.
        in_order = any(
            use.sharding is None or isinstance(use.sharding.options, Adapter) for use in self.uses
        )
        turns = in_turns(zip(styled, owners, strict=True), in_order=in_order)
        with scattering(src_data_rank) as together:
            for uses, needed in progress(turns, "making modules parallel"):
                # Owners read the parameters when they take them again.
                with (
                    given_back(needed),
                    scattering(src_data_rank) if needed else nullcontext(together) as scatter,
                ):
                    for use, axis in uses:
                        _apply(use, axis, scatter, src_data_rank, lower)
        after = dict(self.root.named_parameters(remove_duplicate=False))
        for paths in shared:
            left = [path for path, param in paths.items() if after.get(path) is param]
            if left and any(isinstance(after.get(path), DTensor) for path in paths):
                raise TiedWeightError(
                    f"{', '.join(paths)} were one parameter; {left[0]} still is it, and others are "
                    "sharded: a style that only has `_apply` makes one sharded parameter of them, "
                    "or they are not to be shared before"
                )


def progress(items: Iterable[T], title: str) -> Iterable[T]:
    """Return the items, wrapped in a progress bar on standard error.

    The bar appears after two seconds, on the first rank, if standard error is a terminal, and is
    removed at the end. Nothing is written to logs.

    Example:
        >>> sum(progress([1, 2, 3], "adding"))
        6
    """
    if not sys.stderr.isatty() or (dist.is_initialized() and dist.get_rank() != 0):
        return items
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, title, delay=2, leave=False)
    return bar


def _apply(
    use: Use, axis: DeviceMesh, scatter: Scatter, src_data_rank: int | None, lower: bool
) -> None:
    """Make one module parallel.

    A style that does so by itself finds all values that are in flight.
    """
    if use.sharding is not None and type(use.style)._apply is DeclaredStyle._apply:
        apply_sharding(
            use.module,
            use.sharding,
            axis,
            src_data_rank=src_data_rank,
            lower=lower,
            scatter=scatter,
        )
        return
    scatter.send()
    use.style._with(src_data_rank=src_data_rank, lower=lower)._apply(use.module, axis)
    if use.sharding is None:
        note_undeclared(use.module, type(use.style).__name__)


def apply_plan(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply a plan to a copy of a model without a broadcast: all ranks have the same parameters."""
    resolve(model, plan).apply(mesh, src_data_rank=None)
    watch_draws(model)


# id of the module that holds a parameter, and the parameter's name there
_Owned = tuple[int, str]
# along one axis, a second one; and their names
_Layout = tuple[ParameterPlacement, ParameterPlacement | None, object]


def _owned_parameters(
    owners: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[_Owned, str, nn.Parameter]]:
    """Yield every parameter of the modules, with its owner and its path.

    The owner is a key: the module's id and the parameter's name in it.
    """
    for prefix, owner in owners:
        for name, param in owner._parameters.items():
            if param is not None:
                yield (id(owner), name), f"{prefix}.{name}" if prefix else name, param


def _wrapped(use: Use) -> Iterator[tuple[int, str]]:
    """Yield keys that only one use may have: parameters, or the boundary of a module.

    Each kind of boundary style has its own key.
    """
    if use.sharding is not None and not use.sharding.distributes:
        yield id(use.module), f"boundary of {use.sharding.style}"
        return
    yield id(use.module), ""
    owners = use.module.named_modules() if use.sharding is None else use.sharding.owners(use.module)
    yield from (key for key, _, _ in _owned_parameters(owners))


def _tied(
    root: nn.Module, uses: Iterable[Use]
) -> Iterator[tuple[dict[_Owned, str], dict[_Owned, tuple[Use, _Layout]]]]:
    """Yield the paths of each plain parameter that several modules share, and its layouts.

    The layouts come from the styles at these paths.
    """
    shared: dict[int, dict[_Owned, str]] = {}
    for key, path, param in _owned_parameters(root.named_modules()):
        # what an earlier call has sharded is compared when styles are applied
        if not isinstance(param, DTensor):
            shared.setdefault(id(param), {})[key] = path
    shared = {param: names for param, names in shared.items() if len(names) > 1}
    asked: dict[_Owned, tuple[Use, _Layout]] = {}
    for use in uses if shared else ():
        if use.sharding is not None and use.sharding.distributes:
            first = use.sharding.parameters
            second = use.sharding.second_axis
            for key, path, _ in _owned_parameters(use.sharding.owners(use.module)):
                other = None if second is None else second.get(path, Replicate())
                asked[key] = use, (first.get(path, Replicate()), other, use.style.axis)
    for names in shared.values():
        yield names, {key: asked[key] for key in names if key in asked}


def sharded_parameters(resolved: Resolved) -> Iterator[nn.Parameter]:
    """Yield the parameters that a plan shards."""
    for use in resolved.uses:
        if use.sharding is not None and use.sharding.distributes:
            yield from (
                param for name, param in use.module.named_parameters() if use.sharding.shards(name)
            )


def resolve(root: nn.Module, plan: Plan) -> Resolved:
    """Resolve the style of each module; raise if a style cannot shard its module."""
    if isinstance(plan, (ParallelStyle, str)):
        plan = {"": plan}
    if not isinstance(plan, Mapping):
        raise StyleTypeError(
            "a plan is a ParallelStyle or a dict of module path -> ParallelStyle, got "
            f"{_described(plan)}"
        )
    modules = dict(root.named_modules(remove_duplicate=False))
    tree = Tree(modules)
    plan = _by_module(plan, modules, tree, root)
    uses: list[Use] = []
    unmatched: list[str] = []
    resolved: set[tuple[int, int]] = set()
    for number, (key, value) in enumerate(plan.items()):
        match = tree.match(str(key))
        # A name of a style counts where it is used: plans of a family name what a configuration may
        # lack.
        unused = isinstance(value, str) and type(key) is str and match.token is not None
        style = None if unused else _style(key, value)
        if match.token is not None:
            where = (
                f"{match.reached!r} ({type(modules[match.reached]).__name__})"
                if match.reached
                else "the root"
            )
            missing = f"no child of {where} matches {match.token!r}"
            unmatched.append(
                f"plan entry {key!r} matches no module of {type(root).__name__}: "
                f"{missing}{_suggestion(tree.similar_to(str(key)))}"
            )
        for path in match.paths:
            # A module with several names in the tree is made parallel once.
            if style is not None and (number, id(modules[path])) not in resolved:
                resolved.add((number, id(modules[path])))
                uses.append(_use(key, path, modules[path], style))
    return Resolved(root, (*uses, *_of_tied(root, uses)), tuple(unmatched))


def _of_tied(root: nn.Module, uses: Sequence[Use]) -> Iterator[Use]:
    """Yield styles for modules without a style that hold a weight sharded in another module."""
    for names, asked in _tied(root, uses):
        if not asked:
            continue
        use, (placement, second, axis) = next(iter(asked.values()))
        for key, path in names.items():
            owner, _, name = path.rpartition(".")
            whole = (
                isinstance(placement, Placement)
                and second is None
                and name == "weight"
                and key not in asked
            )
            style = style_of_tied(root.get_submodule(owner), placement) if whole else None  # type: ignore[arg-type]
            if style is not None:
                yield _use(use.key, owner, root.get_submodule(owner), style._with(axis=axis))


def _by_module(
    plan: Mapping[str, ParallelStyle | str],
    modules: Mapping[str, nn.Module],
    tree: Tree,
    root: nn.Module,
) -> Mapping[str, ParallelStyle | str]:
    """Return the plan with entries for single parameters replaced by entries for modules.

    An example is `"experts.down_proj": "rowwise"`.
    """
    if not any(isinstance(value, str) for value in plan.values()):
        return plan
    from .style_names import WITH_CONTEXT, style_in_context  # with all styles that have names

    parameters: dict[str, dict[str, str]] = {}
    for key, value in plan.items():
        if isinstance(value, str) and tree.match(str(key)).token is not None:
            owner, _, name = key.rpartition(".")
            if any(name in modules[path]._parameters for path in tree.match(owner).paths):
                parameters.setdefault(owner, {})[name] = value
    named = {f"{owner}.{name}" for owner, names in parameters.items() for name in names}
    rest = {key: value for key, value in plan.items() if key not in named}
    config = getattr(root, "config", None)
    for key in dict.fromkeys([*rest, *parameters]):
        given = rest.get(key)
        if isinstance(given, ParallelStyle) and key in parameters:
            raise PlanError(
                f"plan entry {key!r}: {given} knows by itself how parameters are sharded; leave "
                f"out {', '.join(f'{key}.{name}' for name in parameters[key])}"
            )
        if key in parameters or (isinstance(given, str) and given in WITH_CONTEXT):
            named_style = given if isinstance(given, str) else None
            rest[key] = style_in_context(named_style, parameters.get(key, {}), config)
    return rest


def named_styles(
    plan: Mapping[str, ParallelStyle | str], root: nn.Module
) -> dict[str, ParallelStyle]:
    """Replace the style names of a plan by styles.

    Entries that match nothing, or that have no style here, are left out.
    """
    tree = Tree(modules := dict(root.named_modules(remove_duplicate=False)))
    styles: dict[str, ParallelStyle] = {}
    with suppress(PlanError):
        for key, value in _by_module(plan, modules, tree, root).items():
            with suppress(PlanError):
                style = _style(key, value) if tree.match(key).token is None else None
                if style is not None:
                    styles[key] = style
    return styles


def _style(key: str, value: object) -> ParallelStyle | None:
    if not isinstance(key, str):
        raise StyleTypeError(f"a plan's keys are module paths, got {type(key).__name__} {key!r}")
    if isinstance(value, str):
        from .style_names import style_named  # as above

        return style_named(value)
    if not isinstance(value, ParallelStyle):
        raise StyleTypeError(
            f"plan entry {key!r}: expected a ParallelStyle or the name of one, got "
            f"{_described(value)}"
        )
    return value


def _suggestion(similar: Sequence[str]) -> str:
    return f"; did you mean {similar[0]!r}?" if similar else ""


def _described(value: object) -> str:
    """Describe the value of a plan entry that is not a style, and the entry to write instead."""
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, type) and issubclass(value, ParallelStyle):
        return f"the class {kind.__name__} itself; write {kind.__name__}()"
    if kind.__module__.startswith("torch.distributed.tensor.parallel"):
        return (
            f"{kind.__name__} of {kind.__module__}, whose styles make DTensors of torch; import "
            f"{kind.__name__} from shoal_tp_styles"
        )
    return kind.__name__


def _use(key: str, path: str, module: nn.Module, style: ParallelStyle) -> Use:
    sharding = style.sharding(module) if isinstance(style, DeclaredStyle) else None
    if sharding is not None:
        check_parameters(module, sharding)
    return Use(key, path, module, style, sharding=sharding)


def axis_mesh(mesh: DeviceMesh, style: ParallelStyle) -> DeviceMesh:
    """Return the mesh on which a style acts: one axis, or the axes that it names.

    LayoutError is raised if the axis is ambiguous.
    """
    check_device_mesh(type(style).__name__, mesh)
    axes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    if style.axis is None:
        if mesh.ndim == 1:
            return mesh
        raise LayoutError(
            f"{style}: the mesh has axes {axes}; name the one that the style uses: "
            f"style.on({mesh.axis_names[-1]!r})"
        )
    axis = style.axis
    if isinstance(axis, int) and axis < mesh.ndim:
        axis = mesh.axis_names[axis]
    if not set(axis if isinstance(axis, tuple) else (axis,)) <= axes.keys():
        raise LayoutError(f"{style}: the mesh has axes {axes}, the style names {style.axis!r}")
    return mesh if mesh.ndim == 1 else mesh[axis]
