"""`learn_conversion`: the mapping from a transformers model to the tensors of its files.

The library's own conversion runs on meta tensors and is recorded, as a server's loader is in
`loaders`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor.internal import check_types

from ..errors import LoaderComputesError
from ..manifest.describe import describe_rank
from ..manifest.records import Manifest
from ..mapping.assignment import Assignment
from ..mapping.weight_mapping import WeightMapping
from .definitions import Source
from .recorder import Recorder
from .recordings import Checkpoint, assign_tensor
from .replay import ComputedError

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


@check_types(model=nn.Module)
def learn_conversion(model: nn.Module, sources: Manifest | None = None) -> WeightMapping:
    """Learn the mapping from a transformers model's weights to the tensors of its files.

    Since transformers 5, a model's modules may differ from its files: experts are stacked, names
    are changed. The library's own conversion, which `save_pretrained` applies, runs on meta tensors
    and is recorded. A server that loads the files composes with it:
    ``learn_conversion(trainer).then(learn_mapping(server, server.load_weights, files))``.

    Args:
        model: a transformers model, parallel or plain, on any device, meta included.
        sources: the manifest of the trainer; by default the model is described here. Pass it if the
            trainer is a pipeline, whose stages have different names.

    Returns:
        The mapping; its witness is "transformers' conversion".

    Raises:
        LoaderComputesError: the conversion computes values.

    Example:
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        >>> config = Qwen3MoeConfig(
        ...     num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=1,
        ...     head_dim=4, moe_intermediate_size=4, num_experts=2, vocab_size=16,
        ... )
        >>> with torch.device("meta"):
        ...     model = Qwen3MoeForCausalLM(config)
        >>> mapping = learn_conversion(model)
        >>> (part,) = mapping.by_target["model.layers.0.mlp.experts.1.up_proj.weight"]
        >>> part.source, part.source_region
        ('model.layers.0.mlp.experts.gate_up_proj', (range(1, 2), range(4, 8), range(0, 8)))
    """
    from transformers.core_model_loading import revert_weight_conversion  # an extra

    manifest = describe_rank(model) if sources is None else sources
    described = []
    for name, record in manifest.tensors.items():
        tensor = torch.empty(record.shape, dtype=record.torch_dtype, device="meta")
        described.append(Source(name, tensor))

    def convert(state: dict[str, Tensor]) -> Mapping[str, Tensor]:
        plain: Any = model
        converted: Mapping[str, Tensor] = revert_weight_conversion(plain, state)
        return converted

    return learn_function(convert, described, "transformers' conversion")


def learn_function(convert: Convert, sources: list[Source], witness: str) -> WeightMapping:
    """Learn the mapping of a function from a state dict to a state dict.

    Args:
        convert: the function.
        sources: its argument, on the meta device.
        witness: the witness of the mapping.

    Raises:
        LoaderComputesError: the function computes values.
    """
    recorder = Recorder()
    checkpoint = Checkpoint(recorder, sources)
    with torch.no_grad(), recorder:
        converted = convert({source.name: source.tensor for source in sources})
    shapes = {}
    assignments: list[Assignment] = []
    for name, tensor in converted.items():
        try:
            assignments += assign_tensor(recorder, name, tensor, checkpoint)
        except ComputedError as error:
            raise LoaderComputesError(f"{name!r}: the conversion {error.reason}") from error
        shapes[name] = tuple(tensor.shape)
    of_sources = {source.name: tuple(source.tensor.shape) for source in sources}
    mapping = WeightMapping(of_sources, shapes, tuple(assignments), witness)
    mapping.check()
    return mapping
