"""Recipes for the blocks of a model: entries of plans to be tried, in order of preference.

A block is a set of modules whose styles are right or wrong together: projections around one
attention, a feed-forward, experts, a vocabulary. Its recipes come from the model's own plan, from
roles (the modules that compute heads or hidden features, and the modules that sum over them), and
from the one recipe that is always right: shards of a weight whose output every rank gathers.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from torch import nn

from shoal_dtensor import Replicate
from shoal_dtensor.errors import StyleError
from shoal_tp_styles import (
    ColwiseParallel,
    ExpertParallel,
    ExpertTensorParallel,
    LatentProjection,
    OwnParameters,
    PackedColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from shoal_tp_styles.internal import (
    COLWISE,
    class_of,
    experts_of,
    kinds_of,
    named_styles,
    out_features,
)

Entries = dict[str, ParallelStyle]

GATHERED = ColwiseParallel(output_layouts=Replicate())
"""Shards of a weight of which every rank gathers the output: right wherever the input is replicated."""
TOKENS = RowwiseParallel(input_layouts=Replicate())
PER_SHARD = SequenceParallel(use_local_output=True)
"""Replicated parameters that a rank uses for its own heads or features: their gradients are summed."""
# part of all parameters below which a module stays whole
_SMALL = 0.01

# Roles by the last names of a path.  What a recipe makes of them is tried, so a name may promise
# too much.
ROLES: dict[str, re.Pattern[str]] = {
    role: re.compile(rf"(^|\.)({names})$")
    for role, names in {
        "column": r"q_proj|k_proj|v_proj|wq|wk|wv|query|key|value|q_lin|k_lin|v_lin|q_b_proj|kv_b_proj|q_attn|"
        r"gate_proj|up_proj|w1|w3|fc1|c_fc|lin1|wi|wi_0|wi_1|fc_in|intermediate\.dense|dense_h_to_4h|"
        r"query_proj|key_proj|value_proj|linear_q|linear_k|linear_v|"
        r"(Self|EncDec|Local|TransientGlobal|LayerSelf)Attention\.(q|k|v)|net1|linear1|in_linear|input_linear",
        "row": r"o_proj|out_proj|wo|out_lin|down_proj|w2|fc2|c_proj|lin2|output\.dense|fc_out|linear_out|"
        r"dense_4h_to_h|(Self|EncDec|Local|TransientGlobal|LayerSelf)Attention\.o|net2|linear2|out_linear|"
        r"output_linear|(attention|attn|self_attention|self_attn)\.dense|Wo|output_dense",
        "fused": r"c_attn|qkv|qkv_proj|query_key_value|Wqkv|gate_up_proj|Wi|W_pack",
        "latent": r"kv_a_proj_with_mqa|kv_a_proj",
        "tokens": r"embed_tokens|tok_embeddings|wte|word_embeddings|shared|token_embedding",
        "head": r"lm_head|output|head|embed_out",
    }.items()
}
_HEADS = re.compile(r"(^|_)n(um)?_(\w+_)?heads?$|^heads?$")
_ABOVE = re.compile(r"(^|\.)(output|self|intermediate|attention\.attention|attention|attn)$")


def _general_paths(model: nn.Module) -> dict[str, str]:
    """Map each path to the path with a wildcard for every index of a list of alike layers."""
    modules = dict(model.named_modules(remove_duplicate=False))
    general = {"": ""}
    for path in list(modules)[1:]:
        above, _, name = path.rpartition(".")
        parent = modules[above]
        children = [*parent.children()]
        alike = (
            len(children) > 1 and len({*map(type, children)}) == 1 and any(children[0].children())
        )
        listed = alike or isinstance(parent, nn.ModuleList)
        general[path] = f"{general[above]}.{'*' if listed and name.isdecimal() else name}".lstrip(
            "."
        )
    return general


def read_above(path: str, parent: Any) -> bool:
    """Tell whether the parent's code names this module's parameters.

    The code may be in a branch that no trial runs.
    """
    name = re.escape(path.rpartition(".")[2])
    return re.search(rf"\.{name}\.(weight|bias)\b", _source(parent.__class__)) is not None


@cache
def _source(kind: type[Any]) -> str:
    """Return the code of a class, or '' if it has no file.

    The whole file of the class is parsed.
    """
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


class ModelBlocks:
    """The modules of a model by wildcard path, and their roles."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.general = model, _general_paths(model)
        self.modules: dict[str, Any] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.modules.setdefault(self.general[path], module)
        self.total = sum(param.numel() for param in model.parameters()) or 1
        self.layers = Counter(self.general.values())
        self.roles = {
            path: role for path, module in self.modules.items() if (role := _role(path, module))
        }
        for path, module in self.modules.items():
            for name, role in _pair(module):
                self.roles.setdefault(f"{path}.{name}".lstrip("."), role)

    def recipes(self) -> dict[str, list[Entries]]:
        """Return entries that may shard each block, best first.

        Example:
            >>> blocks = ModelBlocks(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10)))
            >>> [[*entries] for entries in blocks.recipes()[""]]
            [['0', '2'], ['0', '2']]
        """
        vocabulary = self._vocabulary()
        inside = [path for path, module in self.modules.items() if _is_experts(module)]
        found: dict[str, list[Entries]] = {}
        blocks: dict[str, dict[str, str]] = {}
        for path, role in self.roles.items():
            if (
                path not in vocabulary
                and role in ("column", "row", "fused", "latent")
                and not _below(path, inside)
            ):
                blocks.setdefault(self._block(path), {})[path] = role
        own = self._own(set(blocks), inside, vocabulary)
        for block, roles in blocks.items():
            leaves = [path for path in roles if self._gathers(path)]
            gathered: Entries = dict.fromkeys(leaves, GATHERED)
            found[block] = [*own.pop(block, []), *self._by_roles(block, roles), gathered]
        for path in inside:
            experts: list[Entries] = [
                {path: ExpertTensorParallel()},
                {path: ExpertParallel(input_layouts=Replicate())},
            ]
            found[path] = [*own.pop(path, []), *experts]
        found.update(own)
        if vocabulary:
            found["vocabulary"] = [vocabulary]
        with_role = {path for options in found.values() for entries in options for path in entries}
        for path, module in self.modules.items():
            if path in with_role or _below(path, inside) or not self._gathers(path):
                continue
            size = sum(param.numel() for param in module._parameters.values() if param is not None)
            if not self.is_small(path, size) and not read_above(
                path, self.modules.get(path.rpartition(".")[0])
            ):
                found[path] = [{path: GATHERED}]
        return {
            block: [
                entries
                for i, entries in enumerate(options)
                if entries and entries not in options[:i]
            ]
            for block, options in found.items()
        }

    def is_small(self, path: str, size: int) -> bool:
        """Tell whether a tensor of `size` elements per layer is left whole.

        Gathering the output of a small tensor costs more than its bytes.
        """
        return size * self.layers[path] < _SMALL * self.total

    def _block(self, path: str) -> str:
        above = path.rpartition(".")[0]
        return (
            _ABOVE.sub("", above) if path.endswith(".dense") or above.endswith(".self") else above
        )

    def _own(
        self, blocks: set[str], inside: list[str], vocabulary: Entries
    ) -> dict[str, list[Entries]]:
        """Return the entries of the model's own plan, by block."""
        plan = getattr(self.model, "tp_plan", None)
        if not isinstance(plan, Mapping) or not plan:
            return {}
        found: dict[str, Entries] = {}
        for key, style in named_styles(plan, self.model).items():
            if key in self.modules and key not in vocabulary:
                above = key if key in inside or key in blocks else self._block(key)
                found.setdefault(above, {})[key] = style
        return {block: [entries] for block, entries in found.items()}

    def _by_roles(self, block: str, roles: Mapping[str, str]) -> Iterator[Entries]:
        """Yield column-wise entries with row-wise ones, with all choices of norms and counts."""
        by_role = {role: [path for path in roles if roles[path] == role] for role in ROLES}
        if not by_role["row"] and not by_role["fused"]:
            return
        base: Entries = dict.fromkeys(by_role["column"], ColwiseParallel())
        rotary = getattr(_text_config(self.model), "qk_rope_head_dim", None)
        if rotary:
            base |= dict.fromkeys(by_role["latent"], LatentProjection(rotary=rotary))
        if not base and not by_role["fused"]:
            yield dict.fromkeys(by_role["row"], RowwiseParallel(input_layouts=Replicate()))
            return
        rows: Entries = dict.fromkeys(by_role["row"], RowwiseParallel())
        fused: list[Entries] = [{}]
        if by_role["fused"]:
            three = "gate" not in by_role["fused"][0] and not by_role["fused"][0].endswith("Wi")
            packed = PackedColwiseParallel(blocks=3 if three else 2)
            fused = [
                dict.fromkeys(by_role["fused"], style) for style in (packed, ColwiseParallel())
            ]
        for counts in self._counts(by_role["column"] + by_role["fused"], by_role["row"]):
            for between in self._between(block, roles):
                for style in fused:
                    yield {**base, **style, **between, **rows, **counts}

    def _between(self, block: str, roles: Mapping[str, str]) -> list[Entries]:
        """Return modules of vectors alone, such as norms of heads and learned activations.

        A rank uses them for its own features.
        """
        vectors: Entries = {}
        features: Entries = {}
        for path, module in self.modules.items():
            if (
                path in roles
                or not path.startswith(f"{block}." if block else "")
                or self._block(path) != block
            ):
                continue
            params = [param for param in module._parameters.values() if param is not None]
            if isinstance(module, nn.Embedding) and module.embedding_dim == self._heads(block):
                features[path] = ColwiseParallel()
            elif params and not module._modules and all(param.ndim < 2 for param in params):
                vectors[path] = PER_SHARD
        return [{**features, **vectors}, features] if vectors else [features]

    def _heads(self, block: str) -> int | None:
        config = _text_config(self.model)
        for name, value in {
            **vars(self.modules[block]),
            **(vars(config) if config is not None else {}),
        }.items():
            if (
                type(value) is int
                and _HEADS.search(name)
                and "key_value" not in name
                and "kv" not in name
            ):
                return value
        return None

    def _counts(self, columns: list[str], rows: list[str]) -> Iterator[Entries]:
        """Yield the possible counts, each with the vectors of heads.

        They are no counts, counts of heads alone, and counts of heads and of all their features.
        """
        paths = dict.fromkeys(path.rpartition(".")[0] for path in columns)
        widths = {
            int(self.modules[path].weight.numel() // out_features(self.modules[path]))
            for path in rows
        }
        yield {path: own for path in paths if (own := self._own_parameters(path, ()))}
        for features in (False, True):
            counts: Entries = {}
            for path in paths:
                owner = self.modules[path]
                ints = {
                    name: value
                    for name, value in vars(owner).items()
                    if type(value) is int and value > 1
                }
                chosen = tuple(
                    name
                    for name, value in ints.items()
                    if _HEADS.search(name)
                    or (features and value in widths and not name.startswith("head_"))
                )
                if own := self._own_parameters(path, chosen):
                    counts[path] = own
            if counts:
                yield counts

    def _own_parameters(self, path: str, counts: tuple[str, ...]) -> OwnParameters | None:
        """Return vectors with an entry for each head, and the counts; None if there is neither."""
        vectors = {
            name: p
            for name, p in self.modules[path]._parameters.items()
            if p is not None and p.ndim == 1
        }
        dims = {name: 0 for name, param in vectors.items() if param.shape[0] == self._heads(path)}
        return OwnParameters(dims=dims, counts=counts) if dims or counts else None

    def _vocabulary(self) -> Entries:
        """Return embeddings, output projections, and all modules that share their parameters."""
        entries: Entries = {
            path: TOKENS if role == "tokens" else GATHERED
            for path, role in self.roles.items()
            if role in ("tokens", "head")
        }
        for get in ("get_input_embeddings", "get_output_embeddings"):
            with suppress(AttributeError, NotImplementedError):
                module = getattr(self.model, get)()
                entries |= {
                    path: _of_vocabulary(module, [])
                    for path, each in self.modules.items()
                    if each is module
                }
        # a head may share its bias with the module above it
        while more := self._sharing(entries):
            entries |= more
        return entries

    def _sharing(self, entries: Entries) -> Entries:
        parameters = {
            id(p)
            for path in entries
            for p in self.modules[path]._parameters.values()
            if p is not None
        }
        shared = {
            path: [name for name, param in module._parameters.items() if id(param) in parameters]
            for path, module in self.modules.items()
            if path not in entries
        }
        return {
            path: _of_vocabulary(self.modules[path], names)
            for path, names in shared.items()
            if names
        }

    def _gathers(self, path: str) -> bool:
        return any(kind in COLWISE for kind in kinds_of(self.modules[path]))


def _role(path: str, module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return "tokens" if ROLES["tokens"].search(path) else ""
    if out_features(module) is None:
        return ""
    return next(
        (role for role, names in ROLES.items() if role != "tokens" and names.search(path)), ""
    )


def _of_vocabulary(module: nn.Module, shared: list[str]) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        return TOKENS
    return (
        OwnParameters(dims=dict.fromkeys(shared, 0)) if out_features(module) is None else GATHERED
    )


def _pair(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the roles of a parent's only two Linears if the second reads the first's output."""
    children: Any = module.named_children()
    linears = [(name, child) for name, child in children if class_of(child) is nn.Linear]
    if len(linears) != 2:
        return
    (first, a), (second, b) = linears
    if a.out_features == b.in_features and a.out_features > a.in_features:
        yield first, "column"
        yield second, "row"


def _is_experts(module: nn.Module) -> bool:
    try:
        return experts_of("auto_plan", module).count > 1
    except (StyleError, TypeError, ValueError, NotImplementedError):
        return False


def _below(path: str, roots: list[str]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
