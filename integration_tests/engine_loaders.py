"""Loaders of SGLang, run as they are, recorded and compared with a direct load of the same files.

pip download --no-deps sglang==0.5.23 && python -m zipfile -e sglang-*.whl /tmp/sglang
pip install --no-deps --target /tmp/sglang msgspec orjson pybase64 starlette fastapi pydantic
dill einops
python -m integration_tests.engine_loaders /tmp/sglang              # all architectures
python -m integration_tests.engine_loaders /tmp/sglang qwen3_moe    # some

The wheel is read from a folder and not installed. Its compiled parts and other missing modules get
stand-ins, because loading copies weights and computes nothing.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch import Tensor

from shoal_transfer import LoaderComputesError, WeightMapping, learn_conversion
from shoal_transfer.learn.loaders import learn_on_rank

sys.path.append(str(Path(__file__).parents[1] / "packages/transfer/tests/support"))
from index_tensors import apply_mapping  # beside the tests of the package


class Engine(NamedTuple):
    """An architecture in the engine.

    Attributes:
        module: of the engine.
        name: of its class.
        model_type: of transformers.
        ranks: of the server.
        expert_ranks: groups of ranks that divide the experts by number.
        compute: what the loader computes, by patterns of names.
    """

    module: str
    name: str
    model_type: str
    ranks: int
    expert_ranks: int = 1
    compute: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})


def _add_one(moved: Tensor) -> Tensor:
    return moved + 1.0


ENGINES = [
    Engine("llama", "LlamaForCausalLM", "llama", 4),
    Engine("qwen2", "Qwen2ForCausalLM", "qwen2", 4),
    Engine("qwen3", "Qwen3ForCausalLM", "qwen3", 4),
    Engine("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", 4),
    Engine("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", 4, 2),
    Engine("mixtral", "MixtralForCausalLM", "mixtral", 4),
    Engine("granite", "GraniteForCausalLM", "granite", 2),
    Engine("starcoder2", "Starcoder2ForCausalLM", "starcoder2", 2),
    Engine("commandr", "CohereForCausalLM", "cohere", 2),
    Engine("olmo2", "Olmo2ForCausalLM", "olmo2", 2),
    Engine("glm4", "Glm4ForCausalLM", "glm4", 2),
    # adds 1 to the weights of norms: refused by name where that is not said
    Engine("gemma", "GemmaForCausalLM", "gemma", 2),
    Engine("gemma", "GemmaForCausalLM", "gemma", 2, compute={"*norm.weight": _add_one}),
]
# two kv heads on four ranks, and a vocabulary that is padded
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
MISSING = {
    "aiohttp", "flashinfer", "gguf", "interegular", "llguidance", "loguru", "openai", "outlines",
    "sentencepiece", "tiktoken", "torchao", "torchvision", "triton", "tvm_ffi", "vllm", "xgrammar",
    "zmq",
}  # fmt: skip
UNWRITTEN = -7.0


# --- stand-ins ------------------------------------------------------------------------------------


class StandInType(type):
    """The type of stand-in classes: any attribute exists, and unions are the class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


class StandIn(metaclass=StandInType):
    """A class of a missing module: takes any arguments, subscripts and keywords of subclasses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __init_subclass__(cls, **kwargs: Any) -> None:
        del kwargs

    def __class_getitem__(cls, key: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class StandInModule(ModuleType):
    """A missing module: capitalized names are classes, others are mocks."""

    __path__: list[str] = []  # noqa: RUF012  # of a package
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = MagicMock(name=name)
        if name[0].isupper():
            value = StandInType(name, (StandIn,), {})
        setattr(self, name, value)
        return value


class StandIns(MetaPathFinder, Loader):
    """Finds the modules that are missing here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        top, _, _ = name.partition(".")
        return ModuleSpec(name, self, is_package=True) if top in MISSING else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


def _prepare(folder: str) -> None:
    """Make the engine importable from a folder."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # torch and transformers look for triton when they are imported, so before its stand-in
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("transformers")
    torch.compile = _without_compiling  # type: ignore[assignment]  # nothing is computed
    sys.path.append(folder)
    sys.meta_path.append(StandIns())


def _without_compiling(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _without_compiling


# --- the engine -----------------------------------------------------------------------------------


@contextmanager
def _seat(engine: Engine, rank: int) -> Iterator[None]:
    """Make this process one rank of the engine, without process groups."""
    context: Any = importlib.import_module("sglang.srt.runtime_context")
    inner = engine.ranks // engine.expert_ranks
    widths = {"world_size": engine.ranks, "world_rank": rank, "pp_size": 1, "pp_rank": 0}
    widths |= {"tp_size": engine.ranks, "tp_rank": rank}
    widths |= {"attn_tp_size": engine.ranks, "attn_tp_rank": rank}
    widths |= {"moe_tp_size": inner, "moe_tp_rank": rank % inner}
    widths |= {"moe_ep_size": engine.expert_ranks, "moe_ep_rank": rank // inner}
    values: dict[str, Any] = dict(widths)
    for name, size, place in [("pp", 1, 0), ("tp", engine.ranks, rank)]:
        group = MagicMock(rank_in_group=place, world_size=size)
        group.is_first_rank = True
        group.is_last_rank = True
        values[f"{name}_group"] = group
    values["attn_tp_group"] = values["tp_group"]
    values["moe_tp_group"] = values["tp_group"]
    known = context._parallel_fields()
    known_values = {name: value for name, value in values.items() if name in known}
    arguments = {"tp_size": engine.ranks, "ep_size": engine.expert_ranks, "device": "cpu"}
    arguments["attention_backend"] = "torch_native"
    with ExitStack() as stack:
        stack.enter_context(context.get_context().override_server_args(**arguments))
        stack.enter_context(context.get_parallel().override(**known_values))
        yield


def _bits(value: Tensor) -> Tensor:
    """Return the bits of float32 values as numbers."""
    return value.detach().float().contiguous().view(torch.int32).long()


def _files_of(engine: Engine) -> tuple[Any, dict[str, Tensor]]:
    """Return the configuration, and the bits of the tensors that transformers writes."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(engine.model_type, **SIZES)
    config.architectures = [engine.name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: _bits(value) for name, value in model.state_dict().items()}
    files = apply_mapping(learn_conversion(model), state)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return config, {name: value for name, value in files.items() if name not in tied}


def _recorded(build: Any, config: Any, files: dict[str, Tensor], engine: Engine) -> WeightMapping:
    with torch.device("meta"):
        model = build(config)
    checkpoint = {name: torch.empty(value.shape, device="meta") for name, value in files.items()}
    return learn_on_rank(model, model.load_weights, checkpoint, keep=["*"], compute=engine.compute)


def _differing(
    build: Any, config: Any, files: dict[str, Tensor], mapping: WeightMapping, engine: Engine
) -> list[str]:
    """Return the parameters whose bytes differ between the mapping and a direct load."""
    server = build(config).float()
    for parameter in server.parameters():
        parameter.data.fill_(UNWRITTEN)
    server.load_weights((name, bits.int().view(torch.float32)) for name, bits in files.items())
    found = apply_mapping(mapping, files)
    for name, function in mapping.computed.items():
        before = found[name].int().view(torch.float32)
        found[name] = _bits(engine.compute[function](before))
    kept = _bits(torch.tensor(UNWRITTEN))
    differing = []
    for name, parameter in server.named_parameters():
        moved = found.get(f"{name}@0")
        if moved is None:
            # the second name of a tied parameter
            continue
        if not torch.equal(torch.where(moved == -1, kept, moved), _bits(parameter)):
            differing.append(name)
    return differing


def compare(engine: Engine) -> str:
    """Return what became of one architecture on all its ranks."""
    config, files = _files_of(engine)
    build = getattr(importlib.import_module(f"sglang.srt.models.{engine.module}"), engine.name)
    counts = []
    for rank in range(engine.ranks):
        with _seat(engine, rank):
            try:
                mapping = _recorded(build, config, files, engine)
            except LoaderComputesError as error:
                return f"refused: {error}"
            differing = _differing(build, config, files, mapping, engine)
        if differing:
            return f"WRONG on rank {rank}: {differing}"
        counts.append(len(mapping.assignments))
    return f"equal bytes on {engine.ranks} ranks, {min(counts)} to {max(counts)} assignments"


def main() -> int:
    """Print one line for each architecture; fail if bytes differ."""
    folder, *names = sys.argv[1:]
    _prepare(folder)
    failed = False
    for engine in ENGINES:
        if names and engine.module not in names:
            continue
        outcome = compare(engine)
        failed |= outcome.startswith("WRONG")
        print(f"{engine.module} tp={engine.ranks} ep={engine.expert_ranks}: {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
