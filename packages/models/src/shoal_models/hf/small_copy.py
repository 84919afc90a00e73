"""`small_copy`: a small copy of a transformers model, with example inputs, to prove a plan on.

The copy has every kind of layer of the model, and as few layers as possible. Its weights are
random. It keeps the widths of the configuration if it then has at most `_FEW_PARAMETERS`
parameters: one process holds the parameters of all simulated ranks. Otherwise widths and experts
are divided by a power of two and the vocabulary is shortened; numbers of heads stay as they are.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal_tp_styles.internal import kind_and_first_line

# A copy keeps the widths of the configuration up to this number of parameters. The copy is made in
# float32, and the proof converts it to float64, in which they are 16 MiB.
_FEW_PARAMETERS = 1 << 21
# Divisors of widths, tried from the largest one.
_DIVISORS = (16, 8, 4, 2)
# Smaller widths are not divided. They are the sizes of states, of rotary halves of a head, or of
# models that are tiny already.
_SMALL_WIDTH = 64
# The least number of experts of a smaller copy, so that a router still chooses among them.
_LEAST_EXPERTS = 16
# A shortened vocabulary has the size `_VOCABULARY + vocab_size % _REMAINDER`. If ranks hold uneven
# shards of the model's vocabulary, they thus hold uneven shards of the copy's. Example: 50257
# tokens become 257.
_VOCABULARY = 256
_REMAINDER = 16

# Names of fields of configurations. Numbers of layers: num_hidden_layers, encoder_layers, depth.
_LAYER_COUNT = re.compile(r"layers?$|^depth$")
# Other fields with such names: num_kv_shared_layers, num_dense_layers, num_nextn_predict_layers.
_NO_LAYER_COUNT = re.compile(r"shared|dense|predict|mtp|extract")
# Lists with one entry per layer: layer_types, mlp_layer_types.
_PER_LAYER = re.compile(r"layer|block|attention|pattern|mlp|types|sparsity")
# Widths: hidden_size, head_dim, q_lora_rank.
_WIDTH = re.compile(r"(size|dim|width|rank|d_model|d_ff|d_kv|n_embd|n_inner|d_ssm|dff)$")
# Other sizes: vocab_size, patch_size, chunk_size.
_NO_WIDTH = re.compile(
    r"vocab|patch|image|kernel|chunk|block|batch|window|group|conv|type|max_|bucket|cache"
)
# Numbers of experts: num_experts, n_routed_experts.
_EXPERT_COUNT = re.compile(r"(^|_)(num|n)_(\w+_)?experts$")
# The most positions of a sound encoder, whose input has a fixed length.
_MOST_SOURCES = 16
# The most tokens of a window of attention.
_MOST_OF_WINDOW = 16


class SmallCopy(NamedTuple):
    """A small model on which a plan is proven.

    Attributes:
        model: the model, in float32 on CPU.
        inputs: keyword arguments for its forward.
    """

    model: nn.Module
    inputs: dict[str, Tensor]


class NoSmallCopy(NamedTuple):
    """The reason why a plan cannot be proven on a small copy.

    Attributes:
        reason: the reason, as one line.
    """

    reason: str


def small_copy(model: Any, least_layers: int = 1) -> SmallCopy | NoSmallCopy:
    """Return the smallest copy of a model that has all of its kinds of modules, and that runs.

    Args:
        model: a model of transformers, on any device, including meta.
        least_layers: each list of layers of the copy has at least so many layers, or all layers of
            the model.
    """
    wanted = _kinds_of_modules(model)
    counts = _least_layer_counts(model, least_layers)
    reason = ""
    for reduction in _reductions(model, counts):
        try:
            candidate = _build(model, _reduced_config(model, counts, reduction))
        # any error that a changed configuration raises
        except Exception as error:
            reason = (
                f"a model of a smaller configuration cannot be built: {kind_and_first_line(error)}"
            )
            continue
        if not wanted <= _kinds_of_modules(candidate):
            reason = "a smaller configuration has other modules"
            continue
        inputs, problem = _running_inputs(candidate)
        if inputs is not None:
            return SmallCopy(candidate, inputs)
        reason = f"it does not run on example inputs: {problem}"
    return NoSmallCopy(reason or "its configuration cannot be made smaller")


# --- configurations -------------------------------------------------------------------------------


class _Reduction(NamedTuple):
    """A way to make a configuration smaller.

    Attributes:
        fewer_layers: True if lists of layers are shortened.
        divisor: divisor of the widths and of the number of experts. If it is above 1, the
            vocabulary is shortened too.
    """

    fewer_layers: bool = True
    divisor: int = 1


def _reductions(model: nn.Module, counts: Mapping[int, int]) -> Iterator[_Reduction]:
    """Yield ways to make a configuration smaller, the way with the smallest result first.

    The last ways keep the widths, even above `_FEW_PARAMETERS`, for models whose widths cannot be
    divided.
    """
    if _count_with(model, counts) > _FEW_PARAMETERS:
        for divisor in _DIVISORS:
            yield _Reduction(divisor=divisor)
    yield _Reduction()
    yield _Reduction(fewer_layers=False)


def _reduced_config(model: Any, counts: Mapping[int, int], reduction: _Reduction) -> Any:
    """Return a changed copy of the model's configuration.

    Raises:
        ValueError: if widths are not multiples of the divisor.
    """
    config = copy.deepcopy(model.config)
    for part in _parts(config):
        if reduction.fewer_layers:
            _shorten(part, counts)
        if reduction.divisor > 1:
            _divide_widths(part, reduction.divisor)
    return config


def _parts(config: Any) -> list[Any]:
    """Return the configuration and its nested configurations: for text, images, an encoder."""
    parts = [config]
    for value in vars(config).values():
        # Configurations of transformers have these two attributes, also the classes of remote code.
        is_config = hasattr(value, "to_dict") and hasattr(value, "attribute_map")
        if is_config:
            parts.extend(_parts(value))
    return parts


def _fields(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def _least_layer_counts(model: nn.Module, least_layers: int) -> dict[int, int]:
    """Map the length of a list of layers to the number of first layers that have all its kinds.

    The number is at least `least_layers`, or the length of the list if that is smaller. Lists of
    one length have one number, because a field of a configuration names the length only: it does
    not tell which list it is for.

    Example: six layers of the kinds a, a, b, a, a, b give {6: 3}.
    """
    counts: dict[int, int] = {}
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        kinds = [_kind_of_layer(layer) for layer in module]
        # `index` is the first layer of a kind. In the example, the last of these is layer 2.
        last_first = max(kinds.index(kind) for kind in kinds)
        least = max(1 + last_first, min(least_layers, len(module)))
        counts[len(module)] = max(least, counts.get(len(module), 1))
    return counts


def _kind_of_layer(layer: nn.Module) -> tuple[Any, ...]:
    """Return what layers of one kind have in common.

    These are the modules, the shapes of parameters, and attributes that switch something on.
    """
    found: list[Any] = []
    for path, module in layer.named_modules():
        found.append((path, type(module).__qualname__))
        for name, param in _own_parameters(module):
            found.append((name, tuple(param.shape)))
        for name, value in sorted(vars(module).items()):
            if isinstance(value, bool | str):
                found.append((name, value))
            elif value is None or isinstance(value, int):
                # Layers with different integers, such as the layer's index, are of one kind. A
                # layer with an integer and a layer with None, such as a window, are not.
                found.append((name, type(value)))
    return tuple(found)


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def _shorten(config: Any, counts: Mapping[int, int]) -> None:
    """Give a configuration fewer layers, and lists with an entry per layer fewer entries."""
    fields = _fields(config)
    for name, value in fields.items():
        is_count = _LAYER_COUNT.search(name) and not _NO_LAYER_COUNT.search(name)
        if type(value) is int and is_count and value in counts:
            setattr(config, name, counts[value])
            for list_name, entries in fields.items():
                is_per_layer = _PER_LAYER.search(list_name) and isinstance(entries, list | tuple)
                if is_per_layer and len(entries) == value:
                    setattr(config, list_name, entries[: counts[value]])
    sources = fields.get("max_source_positions")
    if type(sources) is int:
        config.max_source_positions = min(sources, _MOST_SOURCES)
    windows = getattr(config, "attention_window", None)
    if type(windows) is int:
        config.attention_window = min(windows, _MOST_OF_WINDOW)
    elif isinstance(windows, list):
        config.attention_window = [min(window, _MOST_OF_WINDOW) for window in windows]


def _count_with(model: nn.Module, counts: Mapping[int, int]) -> int:
    """Count the parameters of a model whose lists of layers are shortened."""
    total = sum(param.numel() for param in model.parameters())
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            kept = counts.get(len(module), len(module))
            dropped_layers = [*module][kept:]
            for layer in dropped_layers:
                total -= sum(param.numel() for param in layer.parameters())
    return total


def _divide_widths(config: Any, divisor: int) -> None:
    """Divide widths and experts of a configuration, and shorten its vocabulary."""
    for name, value in _fields(config).items():
        if type(value) is not int:
            continue
        is_width = _WIDTH.search(name) and not _NO_WIDTH.search(name)
        if name == "vocab_size":
            config.vocab_size = min(value, _VOCABULARY + value % _REMAINDER)
        elif name.endswith("_token_id") and value >= _VOCABULARY:
            # Special tokens move into the range from 255 - 127 = 128 to 255, away from the tokens 3
            # to 7 of example inputs. Example: token 50256 becomes 255 - 80 = 175.
            setattr(config, name, _VOCABULARY - 1 - value % 128)
        elif _EXPERT_COUNT.search(name) and value // divisor >= _LEAST_EXPERTS:
            setattr(config, name, value // divisor)
        elif is_width and value >= _SMALL_WIDTH:
            if value % divisor:
                raise ValueError(f"{name} of {value} is not a multiple of {divisor}")
            setattr(config, name, value // divisor)
    _check_heads(config)


def _check_heads(config: Any) -> None:
    """Raise unless heads divide the width into heads of an even size, as rotary positions need."""
    width = getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    if type(width) is not int or type(heads) is not int or heads < 1:
        return
    size = getattr(config, "head_dim", None)
    if type(size) is not int:
        size = width // heads
        if width % heads:
            raise ValueError(f"the width {width} is not a multiple of the {heads} heads")
    if size % 2:
        raise ValueError(f"the {size} features of a head cannot be halved")


# --- models ---------------------------------------------------------------------------------------


def _build(model: Any, config: Any) -> Any:
    """Build a model on CPU, with implementations of attention and experts that run in float64.

    The proof of a plan converts the model to float64.
    """
    attention = config._attn_implementation
    if attention not in ("eager", "sdpa"):
        attention = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = type(model)._from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention,
            experts_implementation="eager",
        )
    return made.eval()


def _kinds_of_modules(model: nn.Module) -> set[tuple[Any, ...]]:
    """Return the kinds of modules.

    A kind is the path with a wildcard for numbers, the class, and the names and numbers of dims of
    the parameters. Sizes of dims are left out, because a copy may have smaller widths.
    """
    kinds = set()
    for path, module in model.named_modules():
        general = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
        params = tuple((name, param.ndim) for name, param in _own_parameters(module))
        # torch makes a class for each module with a parametrization, so classes are compared by
        # name.
        kinds.add((general, type(module).__qualname__, params))
    return kinds


# --- inputs ---------------------------------------------------------------------------------------


def _running_inputs(model: Any) -> tuple[dict[str, Tensor] | None, str]:
    """Return the first example inputs on which a model runs, or None and the first error."""
    problem = ""
    for inputs in _example_inputs(model):
        try:
            with torch.no_grad():
                model(**inputs)
        # any error that a model raises on unsuitable inputs
        except Exception as error:
            problem = problem or kind_and_first_line(error)
        else:
            return inputs, ""
    return (
        None,
        problem or f"example inputs for its main input, {model.main_input_name}, cannot be made",
    )


def _example_inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield inputs by the name of the model's main input, likely ones first."""
    generator = torch.Generator().manual_seed(0)
    # Encoders and decoders get the same 5 tokens. 5 is not a multiple of 2, 3 or 4 ranks, so that a
    # plan is also proven on uneven shards of the sequence.
    tokens = torch.randint(3, 8, (2, 5), generator=generator)
    accepted = inspect.signature(model.forward).parameters
    decoder: dict[str, Tensor] = {}
    if model.config.is_encoder_decoder and "decoder_input_ids" in accepted:
        decoder = {"decoder_input_ids": tokens}
    text: dict[str, Tensor] = {}
    if model.main_input_name != "input_ids" and "input_ids" in accepted:
        text = {"input_ids": tokens}
    shapes = _main_shapes(model)
    for shape in shapes:
        values = torch.randn(shape, generator=generator)
        # Most models run on their main input alone, and some also need text. Without a decoder or
        # text these dicts are empty.
        for others in (decoder, {**decoder, **text}):
            yield {model.main_input_name: values, **others}
    if "input_ids" in accepted:
        yield {"input_ids": tokens, **decoder}
        # Some attentions take whole windows of tokens only: 64 is a multiple of `_MOST_OF_WINDOW`.
        yield {"input_ids": tokens.repeat(1, 13)[:, :64], **decoder}


def _main_shapes(model: Any) -> list[tuple[int, ...]]:
    """Return possible shapes of a main input that is not tokens: of images or of sound."""
    sizes: dict[str, Any] = {}
    # `_parts` lists the outer configuration first. In reverse order, its fields replace fields of
    # the same names in nested configurations.
    for part in reversed(_parts(model.config)):
        sizes |= _fields(part)
    name = model.main_input_name
    if name == "pixel_values":
        channels = sizes.get("num_channels", 3)
        image = sizes.get("image_size") or 224
        height, width = image if isinstance(image, list | tuple) else (image, image)
        return [(2, channels, height, width)]
    if name == "input_values":
        bins = sizes.get("num_mel_bins", 128)
        frames = sizes.get("max_length") or 1024
        # waveforms of 4000 samples, without and with a channel, or spectrograms
        return [(2, 4000), (2, 1, 4000), (2, frames, bins)]
    if name == "input_features":
        bins = _first(sizes, "num_mel_bins", "feature_projection_input_dim", "input_channels") or 80
        frames = 2 * (sizes.get("max_source_positions") or 32)
        width = _first(sizes, "input_feat_per_channel", "feature_projection_input_dim") or bins
        # Spectrograms with the frames last, two for each position (the encoder's convolution halves
        # them); or with the features last, for encoders that take any number of frames, such as 64.
        return [(2, bins, frames), (2, 64, width)]
    return []


def _first(sizes: Mapping[str, Any], *names: str) -> int | None:
    return next((sizes[name] for name in names if type(sizes.get(name)) is int), None)
