"""A plan for common transformer shapes, derived from the module tree, for the user to read and edit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from shoal_dtensor import Replicate
from shoal_mesh import DeviceMesh

from ..sharding.module_kinds import out_features
from ..styles.linear import ColwiseParallel, RowwiseParallel
from ..styles.style import ParallelStyle
from .resolve import AutoPlan, apply_plan
from .trial import try_plan

__all__ = ["auto_plan", "format_plan"]

# Conventional names of projections.  The first match wins; a fused projection (c_attn, qkv) needs a packed style and
# the number of its blocks, which names do not say, so it has no entry.
_COLUMNS = re.compile(
    r"(^|\.)(q_proj|k_proj|v_proj|wq|wk|wv|query|key|value|q_lin|k_lin|v_lin|"
    r"gate_proj|up_proj|w1|w3|fc1|c_fc|lin1|wi|wi_0|wi_1|intermediate\.dense|dense_h_to_4h|"
    r"(Self|EncDec)Attention\.(q|k|v)|net1|linear1)$"
)
_ROWS = re.compile(
    r"(^|\.)(o_proj|out_proj|wo|out_lin|down_proj|w2|fc2|c_proj|lin2|output\.dense|dense_4h_to_h|"
    r"(Self|EncDec)Attention\.o|net2|linear2)$"
)
_TOKENS = re.compile(r"(^|\.)(embed_tokens|tok_embeddings|wte|word_embeddings|shared|token_embedding)$")
_HEADS = re.compile(r"(^|\.)(lm_head|output|head|embed_out)$")


def auto_plan(model: nn.Module, mesh: DeviceMesh | None = None, *args: Any, **kwargs: Any) -> AutoPlan:
    """Styles by path, layers of one kind under one wildcard.

    Attention and feed-forward projections by their usual names, else any two Linears of one parent of which the second
    reads the output of the first; the token embedding and the output projection over the vocabulary.

    Names prove nothing: a model may reshape by its own number of heads, or normalise sharded queries.  With a mesh and
    example inputs the plan is run on simulated ranks against the plain model, and the entries of a block that computes
    something else are dropped.  `parallelize_module` takes an automatic plan only where it is proven.

    Args:
        model: not parallel; it stays as it is.
        mesh: with one axis; also an `abstract_mesh`.
        args: example inputs of global shape; a small configuration of a model proves the plan for its shape.
        kwargs: likewise.

    Example:
        >>> import torch
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_tp_styles.testing import StackedMLP
        >>> plan = auto_plan(StackedMLP(), abstract_mesh((4,)), torch.randn(3, 10))
        >>> print(format_plan(plan), plan.proven_for)
        {
            "layers.*.net1": ColwiseParallel(),
            "layers.*.net2": RowwiseParallel(),
        } (4,)
    """
    styles = _styles(model)
    if mesh is None:
        return AutoPlan(styles)
    plan, dropped = AutoPlan(styles), {}
    if _unproven(model, styles, mesh, args, kwargs):
        plan = AutoPlan()
        for block in _blocks(styles):  # each beside those that are proven
            problem = _unproven(model, {**plan, **block}, mesh, args, kwargs)
            if problem:
                dropped.update(dict.fromkeys(block, problem))
            else:
                plan.update(block)
    plan.dropped = dropped
    plan.proven_for = tuple(mesh.shape) if plan else None
    return plan


def _unproven(model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh, args: Any, kwargs: Any) -> str:
    """Why a plan is not proven; empty where it is."""
    trial = try_plan(model, partial(apply_plan, dict(styles)), mesh, args, kwargs)
    return "; ".join((*trial.wrong, *trial.unproven))


def _blocks(styles: Mapping[str, ParallelStyle]) -> list[dict[str, ParallelStyle]]:
    """The entries that are right or wrong together: those below one parent, a `dense` with its block."""
    blocks: dict[str, dict[str, ParallelStyle]] = {}
    for path, style in styles.items():
        parent = re.sub(r"(^|\.)(output|self|intermediate)$", "", path.rpartition(".")[0])
        blocks.setdefault(parent, {})[path] = style
    return list(blocks.values())


def _styles(model: nn.Module) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        style = _by_name(path, module)
        if style is not None:
            styles[path] = style
    for path, module in model.named_modules():
        for name, style in _pair(module):
            styles.setdefault(f"{path}.{name}" if path else name, style)
    for path, style in styles.items():
        if isinstance(style, RowwiseParallel) and not isinstance(model.get_submodule(path), nn.Embedding):
            around = path.rpartition(".")[0]
            fed = any(isinstance(styles.get(name), ColwiseParallel) for name in _siblings(model, path, around))
            if not fed:  # its input is replicated: that of a fused projection, which has no entry
                styles[path] = RowwiseParallel(input_layouts=Replicate())
    return _wildcards(styles)


def _siblings(model: nn.Module, path: str, around: str) -> Iterator[str]:
    """The modules of the same block: below the parent, or, for a `dense` that is an only child, below its parent."""
    wide = re.sub(r"(^|\.)(output|self)$", "", around) if path.endswith("dense") else around
    for name, _ in model.named_modules(remove_duplicate=False):
        if name != path and name.startswith(f"{wide}." if wide else ""):
            yield name


def _by_name(path: str, module: nn.Module) -> ParallelStyle | None:
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate()) if _TOKENS.search(path) else None
    if out_features(module) is None:
        return None
    if _ROWS.search(path):
        return RowwiseParallel()
    if _COLUMNS.search(path):
        return ColwiseParallel()
    return ColwiseParallel(output_layouts=Replicate()) if _HEADS.search(path) else None


def _pair(module: nn.Module) -> Iterator[tuple[str, ParallelStyle]]:
    """The two Linears of a parent that has no others, where the second reads the first's output."""
    linears = [(name, child) for name, child in module.named_children() if type(child) is nn.Linear]
    if len(linears) != 2:
        return
    (first, a), (second, b) = linears
    if a.out_features == b.in_features and a.out_features > a.in_features:
        yield first, ColwiseParallel()
        yield second, RowwiseParallel()


def _wildcards(styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """One entry for the numbered siblings that agree."""
    merged: dict[str, ParallelStyle] = {}
    for path, style in styles.items():
        general = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
        agrees = all(
            other == style for name, other in styles.items() if re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) == general
        )
        merged[general if agrees else path] = style
    return merged


def format_plan(plan: Mapping[str, ParallelStyle]) -> str:
    """A plan as Python text.

    Example:
        >>> print(format_plan({"head": ColwiseParallel()}))
        {
            "head": ColwiseParallel(),
        }
    """
    lines = [f'    "{path}": {_text(style)},' for path, style in plan.items()]
    return "\n".join(["{", *lines, "}"])


def _text(style: ParallelStyle) -> str:
    shown = [
        f"{name}={getattr(style, name)!r}"
        for name in ("input_layouts", "output_layouts")
        if getattr(style, name, None) is not None
    ]
    return f"{type(style).__name__}({', '.join(shown)})"
