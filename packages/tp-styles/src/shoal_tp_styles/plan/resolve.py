"""Resolution of a plan on a model: the style of each module.

`resolve` replaces names by styles, and finds the modules of each entry, including modules that
share a sharded weight. A `ResolvedPlan` knows the errors of the plan, and applies it.

Resolving and checking need no process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from shoal_dtensor import DTensor, Placement
from shoal_dtensor.errors import PlanError, StyleError, StyleTypeError, TiedWeightError
from shoal_dtensor.internal import (
    Owner,
    Scatter,
    batched_by_owner,
    check_same_parameters,
    releasable_owners,
    scattering,
    watch_draws,
    whole_parameters,
)
from shoal_mesh import DeviceMesh

from ..apply.apply import apply_sharding, conflicting_style, note_undeclared
from ..sharding.module_sharding import Adapter
from ..styles.linear import style_of_tied
from ..styles.style import DeclaredStyle, ParallelStyle
from .progress_bar import progress
from .styled_module import StyledModule, axis_mesh, style_module
from .tied_parameters import ParameterOwner, TiedParameter, owned_parameters, tied_parameters
from .wildcards import Match, Tree

Plan = ParallelStyle | str | Mapping[str, ParallelStyle | str]


# Most reasons in a message, and most characters of one reason.
_MOST_REASONS = 6
_LONGEST_REASON = 200

# The name in the key of a module that only one style may shard; it is not a parameter's name.
_WHOLE_MODULE = ""


class AutoPlan(dict[str, ParallelStyle]):
    """A plan of `auto_plan`: styles by path, and whether it is proven.

    `plan.copy()`, `plan | other` and `{**plan}` are plain dicts, which have no proof.

    Attributes:
        proven_for: shape of a mesh. On a mesh of this shape, a trial of the parallel model computed
            the same results as the plain model. None without such a trial.
        dropped: reasons by plan entry (a path of modules). A trial with the entry computed wrong
            results; the plan may have another entry for the same modules.
        whole: reasons by path of a parameter. The plan does not shard the parameter, so every rank
            holds the whole parameter.
    """

    proven_for: tuple[int, ...] | None = None
    dropped: Mapping[str, str] = MappingProxyType({})
    whole: Mapping[str, str] = MappingProxyType({})

    @property
    def why_empty(self) -> str:
        """Reasons why the plan is empty, each with the paths that it applies to.

        These are the reasons of `dropped`, or of `whole` if no entry was dropped.
        """
        if self.dropped:
            reasons = _grouped_reasons(self.dropped, attribute="dropped")
            return f"the plan is empty; modules were left out: {reasons}"
        reasons = _grouped_reasons(self.whole, attribute="whole")
        return f"the plan is empty; parameters are not sharded: {reasons}"


def _grouped_reasons(reasons: Mapping[str, str], *, attribute: str) -> str:
    """Describe reasons by path, paths with the same reason together.

    `attribute` is the attribute of `AutoPlan` that has all of the reasons.
    """
    paths_by_reason: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        paths_by_reason.setdefault(reason[:_LONGEST_REASON], []).append(path)
    groups = [f"{', '.join(paths)}: {reason}" for reason, paths in paths_by_reason.items()]
    described = "; ".join(groups[:_MOST_REASONS])
    omitted = len(groups) - _MOST_REASONS
    if omitted > 0:
        return f"{described}; and {omitted} more reasons in `{attribute}`"
    return described


class ResolvedPlan(NamedTuple):
    """A plan resolved on a module.

    Attributes:
        root: the module.
        uses: styles on modules, in the plan's order.
        unmatched: one message per entry that matches no module.
    """

    root: nn.Module
    uses: tuple[StyledModule, ...]
    unmatched: tuple[str, ...]

    def ambiguous(self) -> Iterable[str]:
        """Return one message for each pair of entries that conflict on a module.

        Two entries conflict if both shard the same parameter. They also conflict if both have the
        same kind of boundary style, which redistributes only the inputs and outputs of the module:
        the second style would redistribute them again.
        """
        use_of_key: dict[tuple[int, str], StyledModule] = {}
        message_of_pair: dict[tuple[int, int], str] = {}
        for use in self.uses:
            for key in _exclusive_keys(use):
                earlier = use_of_key.setdefault(key, use)
                if earlier is use:
                    continue
                message_of_pair[id(earlier), id(use)] = (
                    f"module {use.path!r} is sharded by two entries: {earlier.entry} and "
                    f"{use.entry}"
                )
        return message_of_pair.values()

    def tied_conflicts(self) -> Iterator[str]:
        """Yield shared parameters with two layouts, or with an owner that has no style."""
        undeclared_owners = self._undeclared_owners()
        for tied in tied_parameters(self.root, self.uses):
            layouts = tied.layouts_by_path()
            # A style that only has `_apply` does not declare layouts, and may replace the
            # parameters of its modules. So `apply` compares the parameters after the style has run.
            is_declared = undeclared_owners.isdisjoint(tied.paths.keys())
            if is_declared and len(set(layouts.values())) > 1:
                listed = ", ".join(
                    f"{path}: {layout or 'no style'}" for path, layout in layouts.items()
                )
                yield (
                    f"a parameter that is shared under {len(layouts)} names must have one layout, "
                    f"got {listed}"
                )

    def _undeclared_owners(self) -> set[ParameterOwner]:
        """Return the owners of parameters of modules with styles that only have `_apply`."""
        owners: set[ParameterOwner] = set()
        for use in self.uses:
            if use.sharding is None:
                owned = owned_parameters(use.module.named_modules())
                owners.update(parameter.owner for parameter in owned)
        return owners

    def errors(self) -> Iterator[StyleError]:
        """Yield the errors that prevent the plan from being applied."""
        for use in self.uses:
            conflict = conflicting_style(
                use.module, use.style_name, use.path, distributes=use.distributes
            )
            # An earlier call has applied a style to the module that excludes the plan's style.
            if conflict is not None:
                yield PlanError(conflict)
        yield from map(PlanError, self.ambiguous())
        yield from map(TiedWeightError, self.tied_conflicts())

    def check(self) -> None:
        """Raise the first of the errors, before anything is applied."""
        for error in self.errors():
            raise error

    def apply(self, mesh: DeviceMesh, *, src_data_rank: int | None = 0, lower: bool = True) -> None:
        """Check the plan, then make every module parallel; change nothing if the check raises."""
        self.check()
        if src_data_rank is not None:
            parameters = self.root.named_parameters()
            check_same_parameters("parallelize_module", parameters, mesh, "ranks of the mesh")
        tied_before: list[dict[str, nn.Parameter]] = []
        for tied in tied_parameters(self.root, self.uses):
            paths = tied.paths.values()
            tied_before.append({path: self.root.get_parameter(path) for path in paths})
        uses_on_axes = [(use, axis_mesh(mesh, use.style)) for use in self.uses]
        owners_of_uses = [_owners_to_read(use, axis) for use, axis in uses_on_axes]
        # New parameters, of adapters or of a style without a declaration, are drawn in the plan's
        # order.
        draws_parameters = any(_may_draw(use) for use in self.uses)
        uses_with_owners = zip(uses_on_axes, owners_of_uses, strict=True)
        turns = batched_by_owner(uses_with_owners, as_one_group=draws_parameters)
        with scattering(src_data_rank) as common_scatter:
            for uses_of_turn, owners_of_turn in progress(turns, "making modules parallel"):
                # At the end of a turn, its owners take the parameters back and read the values. The
                # turn therefore has its own scatter, whose values arrive before that.
                scatter_of_turn: AbstractContextManager[Scatter] = nullcontext(common_scatter)
                if owners_of_turn:
                    scatter_of_turn = scattering(src_data_rank)
                with whole_parameters(owners_of_turn), scatter_of_turn as scatter:
                    for use, axis in uses_of_turn:
                        _apply_style(use, axis, scatter, src_data_rank=src_data_rank, lower=lower)
        _check_still_tied(self.root, tied_before)


def _owners_to_read(use: StyledModule, axis: DeviceMesh) -> list[Owner]:
    """Return the owners of the module's parameters that the style replaces."""
    if use.sharding is None or use.distributes:
        return releasable_owners(use.module, axis)
    return []


def _may_draw(use: StyledModule) -> bool:
    """Tell whether applying the style may draw random values for new parameters."""
    return use.sharding is None or isinstance(use.sharding.options, Adapter)


def _check_still_tied(root: nn.Module, tied_before: Iterable[Mapping[str, nn.Parameter]]) -> None:
    """Raise TiedWeightError if styles sharded only some paths of a parameter that was shared."""
    after = dict(root.named_parameters(remove_duplicate=False))
    for params in tied_before:
        unchanged = [path for path, param in params.items() if after.get(path) is param]
        is_sharded = any(isinstance(after.get(path), DTensor) for path in params)
        if unchanged and is_sharded:
            raise TiedWeightError(
                f"{', '.join(params)} were one shared parameter, but the plan replaced some of "
                f"them and left {unchanged[0]} unchanged; a style with `_apply` must assign one "
                "sharded parameter to all names, or untie the parameters before"
            )


def _apply_style(
    use: StyledModule,
    axis: DeviceMesh,
    scatter: Scatter,
    *,
    src_data_rank: int | None,
    lower: bool,
) -> None:
    """Make one module parallel.

    Values that are in flight arrive before a style with its own `_apply` runs.
    """
    # A style with a declaration may still override `_apply`: `LoRA` adds parameters there.
    overrides_apply = type(use.style)._apply is not DeclaredStyle._apply
    if use.sharding is not None and not overrides_apply:
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


def _exclusive_keys(use: StyledModule) -> Iterator[tuple[int, str]]:
    """Yield the keys of a use that no other use of the plan may have.

    A key is the `id` of a module, and one of these names:

    | name                  | keys of a style with this name                                       |
    | --------------------- | -------------------------------------------------------------------- |
    | "boundary of <style>" | its module, if the style shards no parameters                        |
    | `_WHOLE_MODULE`       | its module, if the style shards parameters or only has `_apply`      |
    | name of a parameter   | the modules that hold the parameters which the style shards, or for  |
    |                       | a style that only has `_apply`, all parameters inside of its module  |
    """
    module_id = id(use.module)
    if use.sharding is None:
        yield module_id, _WHOLE_MODULE
        yield from _parameter_keys(use.module.named_modules())
    elif use.distributes:
        yield module_id, _WHOLE_MODULE
        yield from _parameter_keys(use.sharding.owners(use.module))
    else:
        yield module_id, f"boundary of {use.sharding.style}"


def _parameter_keys(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[int, str]]:
    for parameter in owned_parameters(modules):
        yield parameter.owner


def sharded_parameters(resolved: ResolvedPlan) -> Iterator[nn.Parameter]:
    """Yield the parameters that a plan shards."""
    for use in resolved.uses:
        if use.sharding is None or not use.distributes:
            continue
        for name, param in use.module.named_parameters():
            if use.sharding.shards(name):
                yield param


def resolve(root: nn.Module, plan: Plan) -> ResolvedPlan:
    """Resolve the style of each module; raise if a style cannot shard its module."""
    if isinstance(plan, (ParallelStyle, str)):
        plan = {"": plan}
    if not isinstance(plan, Mapping):
        raise StyleTypeError(
            "a plan is a ParallelStyle or a dict of module path -> ParallelStyle, got "
            f"{_describe_entry(plan)}"
        )
    modules = dict(root.named_modules(remove_duplicate=False))
    tree = Tree(modules)
    plan = _by_module(plan, modules, tree, root)
    uses: list[StyledModule] = []
    unmatched: list[str] = []
    for key, value in plan.items():
        match = tree.match(str(key))
        # A style name is looked up only if its entry matches a module. A plan for a family of
        # models may have entries for modules that this model lacks, and their style names may be
        # unknown.
        is_unused_name = not match.is_found and isinstance(value, str) and type(key) is str
        style = None if is_unused_name else _style(key, value)
        if not match.is_found:
            unmatched.append(_unmatched_entry(key, match, modules, tree))
        if style is not None:
            # A module with several names in the tree is made parallel once.
            path_of_module: dict[int, str] = {}
            for path in match.paths:
                path_of_module.setdefault(id(modules[path]), path)
            paths = path_of_module.values()
            uses += [style_module(key, path, modules[path], style) for path in paths]
    completed = (*uses, *_styles_of_tied(root, uses))
    return ResolvedPlan(root, completed, tuple(unmatched))


def _unmatched_entry(key: str, match: Match, modules: Mapping[str, nn.Module], tree: Tree) -> str:
    """Describe an entry that matches no module: where it stops matching, and a similar entry."""
    reached = "the root"
    if match.reached:
        reached = f"{match.reached!r} ({type(modules[match.reached]).__name__})"
    similar = tree.similar_to(str(key))
    suggestion = f"; did you mean {similar[0]!r}?" if similar else ""
    return (
        f"plan entry {key!r} matches no module of {type(modules['']).__name__}: no child of "
        f"{reached} matches {match.token!r}{suggestion}"
    )


def _styles_of_tied(root: nn.Module, uses: Sequence[StyledModule]) -> Iterator[StyledModule]:
    """Yield styles for modules without a style that hold a weight sharded in another module."""
    for tied in tied_parameters(root, uses):
        if not tied.requests:
            continue
        use, layout = next(iter(tied.requests.values()))
        placement = layout.on_first_axis
        acts_on_one_axis = layout.on_second_axis is None
        if not isinstance(placement, Placement) or not acts_on_one_axis:
            continue
        for path in _weights_without_style(tied):
            owner = path.rpartition(".")[0]
            module = root.get_submodule(owner)
            style = style_of_tied(module, placement)
            if style is not None:
                yield style_module(use.key, owner, module, style._with(axis=layout.axis))


def _weights_without_style(tied: TiedParameter) -> Iterator[str]:
    """Yield the paths at which the tied parameter is the weight of a module without a style."""
    for owner, path in tied.paths.items():
        if owner.name == "weight" and owner not in tied.requests:
            yield path


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
    # imported here because the file imports all styles that have names
    from .style_names import WITH_CONTEXT, style_in_context

    parameters = _parameter_styles(plan, modules, tree)
    named: set[str] = set()
    for owner, styles in parameters.items():
        named.update(f"{owner}.{name}" for name in styles)
    by_module = {key: value for key, value in plan.items() if key not in named}
    config = getattr(root, "config", None)
    # entries of modules first, then modules that have entries for single parameters only
    module_entries = list(by_module)
    module_entries += [owner for owner in parameters if owner not in by_module]
    for key in module_entries:
        style = by_module.get(key)
        if isinstance(style, ParallelStyle) and key in parameters:
            entries = ", ".join(f"{key}.{name}" for name in parameters[key])
            raise PlanError(
                f"plan entry {key!r}: {style} shards the parameters itself; leave out {entries}"
            )
        style_name = style if isinstance(style, str) else None
        if key in parameters or style_name in WITH_CONTEXT:
            by_module[key] = style_in_context(style_name, parameters.get(key, {}), config)
    return by_module


def _parameter_styles(
    plan: Mapping[str, ParallelStyle | str], modules: Mapping[str, nn.Module], tree: Tree
) -> dict[str, dict[str, str]]:
    """Return the style names of single parameters, by the entry of their module and their name."""
    styles: dict[str, dict[str, str]] = {}
    for key, value in plan.items():
        if not isinstance(value, str) or tree.match(str(key)).is_found:
            continue
        owner, _, name = key.rpartition(".")
        if any(name in modules[path]._parameters for path in tree.match(owner).paths):
            styles.setdefault(owner, {})[name] = value
    return styles


def named_styles(
    plan: Mapping[str, ParallelStyle | str], root: nn.Module
) -> dict[str, ParallelStyle]:
    """Replace the style names of a plan by styles.

    Left out are entries that match no module, and entries without a supported style. The result is
    empty if an entry for a single parameter is wrong.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    tree = Tree(modules)
    try:
        by_module = _by_module(plan, modules, tree, root)
    except PlanError:
        # an entry for a single parameter does not fit, so no entry can be replaced
        return {}
    styles: dict[str, ParallelStyle] = {}
    for key, value in by_module.items():
        if not tree.match(key).is_found:
            continue
        try:
            style = _style(key, value)
        except PlanError:
            # the name is unknown, or stands for a style that is not supported
            continue
        if style is not None:
            styles[key] = style
    return styles


def _style(key: str, value: object) -> ParallelStyle | None:
    if not isinstance(key, str):
        raise StyleTypeError(
            f"a plan's keys must be module paths, got {type(key).__name__} {key!r}"
        )
    if isinstance(value, str):
        # imported here because the file imports all styles that have names
        from .style_names import style_named

        return style_named(value)
    if not isinstance(value, ParallelStyle):
        raise StyleTypeError(
            f"plan entry {key!r}: expected a ParallelStyle or the name of a style, got "
            f"{_describe_entry(value)}"
        )
    return value


def _describe_entry(value: object) -> str:
    """Describe the value of a plan entry that is not a style, and the entry to write instead."""
    cls = value if isinstance(value, type) else type(value)
    if isinstance(value, type) and issubclass(value, ParallelStyle):
        return f"the class {cls.__name__} itself; write {cls.__name__}()"
    if cls.__module__.startswith("torch.distributed.tensor.parallel"):
        return (
            f"{cls.__name__} of {cls.__module__}, which makes torch's DTensors; import "
            f"{cls.__name__} from shoal_tp_styles"
        )
    return cls.__name__
