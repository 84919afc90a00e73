"""Recipes for the blocks of a model: entries of plans to be tried, in order of preference.

A block is a set of modules with styles that are right or wrong together: projections around one
attention, a feed-forward, experts, a vocabulary. A recipe is a set of entries for one block. Its
source is the model's own plan, or the roles of the modules (some compute heads or hidden features,
others sum over them). The last recipe shards weights and gathers their outputs; it is right
wherever the inputs are replicated.
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

# The weight is sharded and the output is gathered: right wherever the input is replicated.
GATHERED = ColwiseParallel(output_layouts=Replicate())
# The rows of an embedding, one per token, are sharded; every rank gets all tokens.
TOKENS = RowwiseParallel(input_layouts=Replicate())
# Replicated parameters that a rank uses for its own heads or features: their gradients are summed.
PER_SHARD = SequenceParallel(use_local_output=True)
# A module with a smaller part of all parameters than this stays whole.
_SMALL = 0.01

# Last names of a path, by role. "fused" is several column-wise projections in one weight; "latent"
# is the projection to the latent of multi-head latent attention. A name may suggest a wrong role:
# with a mesh, recipes are proven before they are used.
_NAMES_OF_ROLES = {
    "column": r"q_proj|k_proj|v_proj|wq|wk|wv|query|key|value|q_lin|k_lin|v_lin|q_b_proj|kv_b_proj|"
    r"q_attn|gate_proj|up_proj|w1|w3|fc1|c_fc|lin1|wi|wi_0|wi_1|fc_in|intermediate\.dense|"
    r"dense_h_to_4h|query_proj|key_proj|value_proj|linear_q|linear_k|linear_v|"
    r"(Self|EncDec|Local|TransientGlobal|LayerSelf)Attention\.(q|k|v)|net1|linear1|in_linear|"
    r"input_linear",
    "row": r"o_proj|out_proj|wo|out_lin|down_proj|w2|fc2|c_proj|lin2|output\.dense|fc_out|"
    r"linear_out|dense_4h_to_h|(Self|EncDec|Local|TransientGlobal|LayerSelf)Attention\.o|"
    r"net2|linear2|"
    r"out_linear|output_linear|(attention|attn|self_attention|self_attn)\.dense|Wo|output_dense",
    "fused": r"c_attn|qkv|qkv_proj|query_key_value|Wqkv|gate_up_proj|Wi|W_pack",
    "latent": r"kv_a_proj_with_mqa|kv_a_proj",
    "tokens": r"embed_tokens|tok_embeddings|wte|word_embeddings|shared|token_embedding",
    "head": r"lm_head|output|head|embed_out",
}
ROLES: dict[str, re.Pattern[str]] = {
    role: re.compile(rf"(^|\.)({names})$") for role, names in _NAMES_OF_ROLES.items()
}
# Names of attributes that are numbers of heads.
_HEADS = re.compile(r"(^|_)n(um)?_(\w+_)?heads?$|^heads?$")
# Last names of modules that belong to the block of the module above them.
_ABOVE = re.compile(r"(^|\.)(output|self|intermediate|attention\.attention|attention|attn)$")


def _general_paths(model: nn.Module) -> dict[str, str]:
    """Map each path to its general path, which has `*` for each index in a list of layers.

    Example: the paths `layers.0.fc1` and `layers.1.fc1` both map to `layers.*.fc1`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    general = {"": ""}
    for path in list(modules)[1:]:
        above, _, name = path.rpartition(".")
        if name.isdecimal() and _is_list_of_layers(modules[above]):
            name = "*"
        general[path] = f"{general[above]}.{name}".lstrip(".")
    return general


def _is_list_of_layers(module: nn.Module) -> bool:
    """Tell whether the children of a module are layers of one kind."""
    if isinstance(module, nn.ModuleList):
        return True
    children = [*module.children()]
    if len(children) < 2 or not any(children[0].children()):
        return False
    return len({type(child) for child in children}) == 1


def read_above(path: str, parent: Any) -> bool:
    """Tell whether the parent's code names this module's parameters, as in `self.fc.weight`.

    The text of the code is searched, because no trial may run the branch that reads them.
    """
    name = re.escape(path.rpartition(".")[2])
    return re.search(rf"\.{name}\.(weight|bias)\b", _source(parent.__class__)) is not None


@cache
def _source(cls: type[Any]) -> str:
    """Return the code of a class, or '' if it has no file.

    Results are cached, because `inspect` parses the whole file of the class.
    """
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


class ModelBlocks:
    """The modules of a model by general path, and their roles.

    Attributes:
        model: the model.
        general: path of a module -> its general path, with `*` for the indices of layers.
        modules: general path -> the first module with that path.
        total: the number of the model's elements of parameters, at least 1.
        layers: general path -> the number of modules with that path.
        roles: general path -> the role of its modules, a key of `ROLES`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.general = _general_paths(model)
        self.modules: dict[str, Any] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.modules.setdefault(self.general[path], module)
        self.total = sum(param.numel() for param in model.parameters()) or 1
        self.layers = Counter(self.general.values())
        self.roles: dict[str, str] = {}
        for path, module in self.modules.items():
            role = _role(path, module)
            if role:
                self.roles[path] = role
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
        experts = [path for path, module in self.modules.items() if _is_experts(module)]
        blocks = self._projections_by_block(vocabulary, experts)
        declared = self._declared_entries(set(blocks), experts, vocabulary)
        options: dict[str, list[Entries]] = {}
        for block, roles in blocks.items():
            gathered_paths = [path for path in roles if self._gathers(path)]
            gathered: Entries = dict.fromkeys(gathered_paths, GATHERED)
            options[block] = [*declared.pop(block, []), *self._by_roles(block, roles), gathered]
        for path in experts:
            by_hidden: Entries = {path: ExpertTensorParallel()}
            by_expert: Entries = {path: ExpertParallel(input_layouts=Replicate())}
            options[path] = [*declared.pop(path, []), by_hidden, by_expert]
        options.update(declared)
        if vocabulary:
            options["vocabulary"] = [vocabulary]
        options.update(self._single_modules(options, experts))
        return {block: _distinct(recipes) for block, recipes in options.items()}

    def _projections_by_block(
        self, vocabulary: Entries, experts: list[str]
    ) -> dict[str, dict[str, str]]:
        """Return the roles of the projections of each block, by path."""
        blocks: dict[str, dict[str, str]] = {}
        for path, role in self.roles.items():
            is_projection = role in ("column", "row", "fused", "latent")
            if is_projection and path not in vocabulary and not _below(path, experts):
                blocks.setdefault(self._block(path), {})[path] = role
        return blocks

    def _single_modules(
        self, options: Mapping[str, list[Entries]], experts: list[str]
    ) -> dict[str, list[Entries]]:
        """Return recipes that gather the output, for modules that no other recipe names."""
        named: set[str] = set()
        for recipes in options.values():
            for entries in recipes:
                named.update(entries)
        single: dict[str, list[Entries]] = {}
        for path, module in self.modules.items():
            if path in named or _below(path, experts) or not self._gathers(path):
                continue
            params = [param for param in module._parameters.values() if param is not None]
            size = sum(param.numel() for param in params)
            parent = self.modules.get(path.rpartition(".")[0])
            if not self.is_small(path, size) and not read_above(path, parent):
                single[path] = [{path: GATHERED}]
        return single

    def is_small(self, path: str, size: int) -> bool:
        """Tell whether a tensor of `size` elements per layer is left whole.

        A small tensor stays whole, because gathering the output would cost more than the bytes that
        its shards save.
        """
        return size * self.layers[path] < _SMALL * self.total

    def _block(self, path: str) -> str:
        """Return the path of the block of a module: the module above it, or one higher.

        Example: `layer.*.attention.self.query` and `layer.*.attention.output.dense` are both in the
        block `layer.*.attention`.
        """
        above = path.rpartition(".")[0]
        is_nested = path.endswith(".dense") or above.endswith(".self")
        return _ABOVE.sub("", above) if is_nested else above

    def _declared_entries(
        self, blocks: set[str], experts: list[str], vocabulary: Entries
    ) -> dict[str, list[Entries]]:
        """Return the entries of the model's own plan, by block."""
        plan = getattr(self.model, "tp_plan", None)
        if not isinstance(plan, Mapping) or not plan:
            return {}
        by_block: dict[str, Entries] = {}
        for key, style in named_styles(plan, self.model).items():
            if key in self.modules and key not in vocabulary:
                is_block = key in experts or key in blocks
                block = key if is_block else self._block(key)
                by_block.setdefault(block, {})[key] = style
        return {block: [entries] for block, entries in by_block.items()}

    def _by_roles(self, block: str, roles: Mapping[str, str]) -> Iterator[Entries]:
        """Yield recipes with column-wise and row-wise projections.

        There is one for each choice of entries for fused projections, for the modules between the
        projections, and for the counts of heads.
        """
        by_role: dict[str, list[str]] = {role: [] for role in ROLES}
        for path, role in roles.items():
            by_role[role].append(path)
        columns = by_role["column"]
        rows = by_role["row"]
        fused = by_role["fused"]
        if not rows and not fused:
            return
        base: Entries = dict.fromkeys(columns, ColwiseParallel())
        rotary = getattr(_text_config(self.model), "qk_rope_head_dim", None)
        if rotary:
            base |= dict.fromkeys(by_role["latent"], LatentProjection(rotary=rotary))
        if not base and not fused:
            yield dict.fromkeys(rows, RowwiseParallel(input_layouts=Replicate()))
            return
        row_entries: Entries = dict.fromkeys(rows, RowwiseParallel())
        fused_options = _fused_entries(fused)
        for counts in self._counts(columns + fused, rows):
            for between in self._between(block, roles):
                for fused_entries in fused_options:
                    yield {**base, **fused_entries, **between, **row_entries, **counts}

    def _between(self, block: str, roles: Mapping[str, str]) -> list[Entries]:
        """Return possible entries for modules that a rank uses for its own heads or features.

        These are embeddings with one feature per head, and modules whose parameters are vectors
        alone, such as norms of heads and learned activations. A module of vectors may also be used
        for all features, so a second choice leaves these modules out.
        """
        vectors: Entries = {}
        features: Entries = {}
        prefix = f"{block}." if block else ""
        for path, module in self.modules.items():
            if path in roles or not path.startswith(prefix) or self._block(path) != block:
                continue
            params = [param for param in module._parameters.values() if param is not None]
            has_vectors_alone = bool(params) and all(param.ndim < 2 for param in params)
            if isinstance(module, nn.Embedding) and module.embedding_dim == self._heads(block):
                features[path] = ColwiseParallel()
            elif has_vectors_alone and not module._modules:
                vectors[path] = PER_SHARD
        return [{**features, **vectors}, features] if vectors else [features]

    def _heads(self, block: str) -> int | None:
        """Return the number of query heads, from an attribute of the block or the configuration."""
        attributes = dict(vars(self.modules[block]))
        config = _text_config(self.model)
        if config is not None:
            attributes |= vars(config)
        for name, value in attributes.items():
            counts_keys = "key_value" in name or "kv" in name
            if type(value) is int and _HEADS.search(name) and not counts_keys:
                return value
        return None

    def _counts(self, columns: list[str], rows: list[str]) -> Iterator[Entries]:
        """Yield possible entries for the modules that own the projections of a block.

        An entry shards vectors with one element per head, and divides counts: integers by which the
        module reshapes. The choices are no counts, counts of heads alone, and counts of heads and
        of the features of all heads.
        """
        paths = dict.fromkeys(path.rpartition(".")[0] for path in columns)
        widths: set[int] = set()
        for path in rows:
            module = self.modules[path]
            widths.add(int(module.weight.numel() // out_features(module)))
        yield self._own_parameters(dict.fromkeys(paths, ()))
        for with_features in (False, True):
            counts: dict[str, tuple[str, ...]] = {}
            for path in paths:
                counts[path] = _counts_of(self.modules[path], widths if with_features else set())
            entries = self._own_parameters(counts)
            if entries:
                yield entries

    def _own_parameters(self, counts: Mapping[str, tuple[str, ...]]) -> Entries:
        """Return entries for the modules that have counts, or vectors with one element per head.

        Args:
            counts: path of a module -> names of its counts.
        """
        entries: Entries = {}
        for path, names in counts.items():
            heads = self._heads(path)
            dims: dict[str, int] = {}
            for name, param in self.modules[path]._parameters.items():
                if param is not None and param.ndim == 1 and param.shape[0] == heads:
                    dims[name] = 0
            if dims or names:
                entries[path] = OwnParameters(dims=dims, counts=names)
        return entries

    def _vocabulary(self) -> Entries:
        """Return embeddings, output projections, and all modules that share their parameters."""
        entries: Entries = {}
        for path, role in self.roles.items():
            if role == "tokens":
                entries[path] = TOKENS
            elif role == "head":
                entries[path] = GATHERED
        for get in ("get_input_embeddings", "get_output_embeddings"):
            with suppress(AttributeError, NotImplementedError):
                embedding = getattr(self.model, get)()
                for path, module in self.modules.items():
                    if module is embedding:
                        entries[path] = _of_vocabulary(module, [])
        # A module that was found by a shared weight may share its bias with yet another module.
        while more := self._sharing(entries):
            entries |= more
        return entries

    def _sharing(self, entries: Entries) -> Entries:
        """Return entries for modules that share parameters with modules that have entries."""
        shared_ids: set[int] = set()
        for path in entries:
            params = self.modules[path]._parameters.values()
            shared_ids.update(id(param) for param in params if param is not None)
        sharing: Entries = {}
        for path, module in self.modules.items():
            if path in entries:
                continue
            names = [name for name, param in module._parameters.items() if id(param) in shared_ids]
            if names:
                sharing[path] = _of_vocabulary(module, names)
        return sharing

    def _gathers(self, path: str) -> bool:
        return any(cls in COLWISE for cls in kinds_of(self.modules[path]))


def _distinct(recipes: list[Entries]) -> list[Entries]:
    """Return the recipes that are not empty, each once."""
    distinct: list[Entries] = []
    for entries in recipes:
        if entries and entries not in distinct:
            distinct.append(entries)
    return distinct


def _fused_entries(paths: list[str]) -> list[Entries]:
    """Return the possible entries for fused projections: sharded block by block, or as a whole.

    A fused projection has two blocks (gate and up) or three (query, key and value).
    """
    if not paths:
        return [{}]
    first = paths[0]
    is_gate_and_up = "gate" in first or first.endswith("Wi")
    packed = PackedColwiseParallel(blocks=2 if is_gate_and_up else 3)
    return [dict.fromkeys(paths, packed), dict.fromkeys(paths, ColwiseParallel())]


def _counts_of(owner: nn.Module, widths: set[int]) -> tuple[str, ...]:
    """Return the names of a module's integers that count heads, or that equal one of the widths."""
    counts = []
    for name, value in vars(owner).items():
        if type(value) is not int or value <= 1:
            continue
        counts_features = value in widths and not name.startswith("head_")
        if _HEADS.search(name) or counts_features:
            counts.append(name)
    return tuple(counts)


def _role(path: str, module: nn.Module) -> str:
    """Return the role of a module by its path; empty if it has none."""
    if isinstance(module, nn.Embedding):
        return "tokens" if ROLES["tokens"].search(path) else ""
    if out_features(module) is None:
        return ""
    for role, names in ROLES.items():
        if role != "tokens" and names.search(path):
            return role
    return ""


def _of_vocabulary(module: nn.Module, shared: list[str]) -> ParallelStyle:
    """Return the style of a module that holds, or shares, parameters of the vocabulary.

    Args:
        module: an embedding, an output projection, or a module around them.
        shared: names of the module's own parameters that are shared.
    """
    if isinstance(module, nn.Embedding):
        return TOKENS
    if out_features(module) is None:
        return OwnParameters(dims=dict.fromkeys(shared, 0))
    return GATHERED


def _pair(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the roles of a module's only two Linears if their shapes are those of a feed-forward.

    The first Linear widens its input, and the second takes as many features as the first returns.
    """
    children: Any = module.named_children()
    linears = [(name, child) for name, child in children if class_of(child) is nn.Linear]
    if len(linears) != 2:
        return
    (first_name, first), (second_name, second) = linears
    hidden = first.out_features
    if hidden == second.in_features and hidden > first.in_features:
        yield first_name, "column"
        yield second_name, "row"


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
