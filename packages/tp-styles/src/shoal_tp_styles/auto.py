"""A plan for common transformer shapes, found from the module tree, for the user to read and edit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from shoal_dtensor import Replicate

from .linear import ColwiseParallel, RowwiseParallel
from .structure import out_features
from .style import ParallelStyle

__all__ = ["auto_plan", "format_plan"]

# What the last tokens of a path tell.  First match wins; a fused projection (c_attn, qkv) needs a packed style and
# the number of its parts, which no name tells, so it is left out on purpose.
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


def auto_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Styles by path, layers of one kind under one wildcard.

    Attention and feed-forward projections by their usual names, else any two Linears of one parent of which the second
    takes what the first gives; the token embedding and the output projection over the vocabulary.

    Example:
        >>> from shoal_tp_styles.testing import StackedMLP
        >>> print(format_plan(auto_plan(StackedMLP())))
        {
            "layers.*.net1": ColwiseParallel(),
            "layers.*.net2": RowwiseParallel(),
        }
    """
    found: dict[str, ParallelStyle] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        style = _by_name(path, module)
        if style is not None:
            found[path] = style
    for path, module in model.named_modules():
        for name, style in _pair(module):
            found.setdefault(f"{path}.{name}" if path else name, style)
    for path, style in found.items():
        if isinstance(style, RowwiseParallel) and not isinstance(model.get_submodule(path), nn.Embedding):
            around = path.rpartition(".")[0]
            fed = any(isinstance(found.get(name), ColwiseParallel) for name in _siblings(model, path, around))
            if not fed:  # what it reads is whole: a fused projection, say, that has no entry
                found[path] = RowwiseParallel(input_layouts=Replicate())
    return _wildcards(found)


def _siblings(model: nn.Module, path: str, around: str) -> Iterator[str]:
    """The modules of the same block: below the parent, or, for a `dense` that hangs alone, below its parent."""
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


def _wildcards(found: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """One entry for the numbered siblings that agree."""
    merged: dict[str, ParallelStyle] = {}
    for path, style in found.items():
        general = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
        agrees = all(
            other == style for name, other in found.items() if re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) == general
        )
        merged[general if agrees else path] = style
    return merged


def format_plan(plan: dict[str, ParallelStyle]) -> str:
    """A plan as the Python text one would write."""
    lines = [f'    "{path}": {_text(style)},' for path, style in plan.items()]
    return "\n".join(["{", *lines, "}"])


def _text(style: ParallelStyle) -> str:
    shown = [
        f"{name}={getattr(style, name)!r}"
        for name in ("input_layouts", "output_layouts")
        if getattr(style, name, None) is not None
    ]
    return f"{type(style).__name__}({', '.join(shown)})"
