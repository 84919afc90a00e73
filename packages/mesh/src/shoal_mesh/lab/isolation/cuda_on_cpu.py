"""Programs for CUDA on the CPU: a rank of a lab with `device="cpu"` calls `map_cuda_to_cpu`.

A program names its device in five ways. Each of them means the CPU on such a rank:

- a device of torch: `torch.device("cuda", 3)` is `torch.device("cpu")`;
- an argument of torch's functions: `x.to("cuda")`, `torch.ones(2, device=0)`;
- `torch.cuda`: streams do nothing, events measure time, generators are those of the CPU, counters
  of memory are 0;
- the device type of autocast, of gradient scalers and of device meshes;
- the device ids of `DistributedDataParallel`.

A move of a tensor to the device returns the tensor itself, because it is on the CPU already: the
"copy" on the device and the original are one tensor. The mapping changes torch for the whole
process and is never undone: it is for processes that are forked to be a rank.
"""

from __future__ import annotations

import copyreg
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from ... import _torch
from ...errors import MeshError

_CPU = torch.device("cpu")
_TorchDevice = torch.device
_TorchGenerator = torch.Generator
_DEVICE_NAME = "CPU in the place of CUDA"


def map_cuda_to_cpu(local_rank: int, ranks: int) -> None:
    """Map everything that names CUDA to the CPU, in this process from now on.

    Args:
        local_rank: the index of the device that `torch.cuda.current_device()` returns first.
        ranks: the number of devices that `torch.cuda.device_count()` returns.
    """
    # torch has no public hook that changes what a device is
    torch.device = MappedDevice  # type: ignore[misc]
    torch.Generator = MappedGenerator  # type: ignore[misc]
    copyreg.pickle(_TorchDevice, _reduce_device)
    _map_torch_cuda(_CudaState(local_rank, ranks))
    _map_methods_of_tensors()
    _map_parameters()
    DeviceArguments().__enter__()  # type: ignore[no-untyped-call]  # of torch


class _StandIn(type):
    """The type of a stand-in: a class that replaces a class of torch, and has the same instances.

    Attributes:
        original: the class of torch.
    """

    original: type

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.original)


class MappedDevice(metaclass=_StandIn):
    """Stands for `torch.device`, and makes devices of torch that are never CUDA devices."""

    original = _TorchDevice

    def __new__(cls, *args: Any, **kwargs: Any) -> torch.device:  # type: ignore[misc]  # of torch
        # `torch.device(0)` is an accelerator, and torch refuses it if there is none
        has_index_only = bool(args) and isinstance(args[0], int)
        return _CPU if has_index_only else map_device(_TorchDevice(*args, **kwargs))


class MappedGenerator(metaclass=_StandIn):
    """Stands for `torch.Generator`, and makes torch's generators, but never CUDA generators."""

    original = _TorchGenerator

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]  # of torch
        return _TorchGenerator(map_device(device))


def _reduce_device(device: torch.device) -> tuple[type, tuple[str]]:
    """Pickle a device by the name `torch.device`, which is a stand-in here."""
    return MappedDevice, (str(device),)


def map_device(device: object) -> Any:
    """Return the CPU for a CUDA device in any form that torch takes, and all else unchanged.

    Args:
        device: a device, its name such as `cuda:1`, or its index.
    """
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    if isinstance(device, _TorchDevice):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


class DeviceArguments(TorchFunctionMode):
    """Maps the devices in arguments of torch's functions."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": map_device(kwargs["device"])}
        if function is torch.Tensor.to:
            # the only function that takes a device by position
            args = (args[0], *map(map_device, args[1:]))
        return function(*args, **kwargs)


@dataclass(slots=True)
class _CudaState:
    """The devices that a rank sees.

    Attributes:
        current: the index of the current device.
        count: the number of devices.
    """

    current: int
    count: int

    def set_device(self, device: Any) -> None:
        """Change the index of the current device; devices without an index change nothing."""
        if isinstance(device, str) and device.startswith("cuda:"):
            device = int(device.removeprefix("cuda:"))
        if isinstance(device, int):
            self.current = device

    def current_device(self) -> int:
        return self.current

    def device_count(self) -> int:
        return self.count

    def get_rng_state_all(self) -> list[Tensor]:
        """Return a state per device; the devices share the generator of the CPU."""
        return [torch.get_rng_state()] * self.count

    def set_rng_state_all(self, new_states: Sequence[Tensor]) -> None:
        """Set the generator to the state of the current device."""
        torch.set_rng_state(new_states[self.current])


class StreamOnCpu:
    """A stream on which all work is done when it is submitted."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device = _CPU
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    def wait_stream(self, stream: StreamOnCpu) -> None:
        """Do nothing: the work of the other stream is done."""

    def wait_event(self, event: EventOnCpu) -> None:
        """Do nothing: an event that was recorded has happened."""

    def record_event(self, event: EventOnCpu | None = None) -> EventOnCpu:
        """Record an event, or a new one, and return it."""
        recorded = event or EventOnCpu()
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        """Return True: no work is in flight."""
        return True

    def synchronize(self) -> None:
        """Do nothing: no work is in flight."""


class EventOnCpu:
    """An event that happens when it is recorded."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: StreamOnCpu | None = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: StreamOnCpu | None = None) -> None:
        """Do nothing: an event that was recorded has happened."""

    def query(self) -> bool:
        """Return True: an event that was recorded has happened."""
        return True

    def synchronize(self) -> None:
        """Do nothing: an event that was recorded has happened."""

    def elapsed_time(self, end: EventOnCpu) -> float:
        """Return the milliseconds between two recorded events."""
        if self._seconds is None or end._seconds is None:
            raise MeshError("elapsed_time needs two events that were recorded: call record() first")
        return 1000.0 * (end._seconds - self._seconds)


@contextmanager
def _choose_nothing(stream_or_device: Any) -> Iterator[None]:
    """Stand for `torch.cuda.stream` and `torch.cuda.device`, which choose where work is done."""
    yield


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties of the CPU in the words of `torch.cuda.get_device_properties`.

    Attributes:
        name: of the device.
        total_memory: bytes of this machine.
        major: of the compute capability; 0, which no kernel for CUDA accepts.
        minor: of the compute capability.
        multi_processor_count: number of processors.
    """

    name: str
    total_memory: int
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 1


def _properties(device: Any = None) -> DeviceProperties:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceProperties(_DEVICE_NAME, memory)


def _return(value: Any) -> Callable[..., Any]:
    """Return a function that ignores its arguments and returns a value."""
    return lambda *args, **kwargs: value


def _refuse() -> NoReturn:
    raise MeshError(
        "this function of torch.cuda needs a device, and this rank of a lab has the CPU in its "
        "place (device='cpu'): run the lab on a machine with CUDA and without device=, or guard "
        "the call with `if tensor.is_cuda`"
    )


_ONLY_STREAM = StreamOnCpu()
_DEFAULT_GENERATOR = torch.default_generator


def _get_memory(device: Any = None) -> tuple[int, int]:
    total = _properties().total_memory
    return total, total


def _get_memory_stats(device: Any = None) -> dict[str, int]:
    return defaultdict(int)


def _get_rng_state(device: Any = None) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: Any = None) -> None:
    torch.set_rng_state(new_state)


_WITHOUT_EFFECT = [
    "init",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "set_stream",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "set_per_process_memory_fraction",
    "set_sync_debug_mode",
]
_COUNTERS_OF_MEMORY = [
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "device_memory_used",
]
# function of torch.cuda -> the value that it returns, whatever its arguments
_ANSWERS: dict[str, Any] = {
    **dict.fromkeys(_WITHOUT_EFFECT),
    **dict.fromkeys(_COUNTERS_OF_MEMORY, 0),
    "is_available": True,
    "is_initialized": True,
    "is_bf16_supported": True,
    "is_tf32_supported": False,
    "is_current_stream_capturing": False,
    "get_device_name": _DEVICE_NAME,
    "get_device_capability": (0, 0),
    "get_arch_list": [],
    "current_stream": _ONLY_STREAM,
    "default_stream": _ONLY_STREAM,
    "memory_summary": "",
    "memory_snapshot": [],
}
# function or class of torch.cuda -> what replaces it
_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "get_device_properties": _properties,
    "device": _choose_nothing,
    "device_of": _choose_nothing,
    "stream": _choose_nothing,
    "StreamContext": _choose_nothing,
    "Stream": StreamOnCpu,
    "Event": EventOnCpu,
    "mem_get_info": _get_memory,
    "memory_stats": _get_memory_stats,
    # torch.manual_seed calls manual_seed_all, so that cannot be torch.manual_seed
    "manual_seed": _DEFAULT_GENERATOR.manual_seed,
    "manual_seed_all": _DEFAULT_GENERATOR.manual_seed,
    "seed": _DEFAULT_GENERATOR.seed,
    "seed_all": _DEFAULT_GENERATOR.seed,
    "initial_seed": torch.initial_seed,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
}
# the functions of torch.cuda whose answers depend on the rank: they are methods of `_CudaState`
_ANSWERED_BY_STATE = [
    "device_count",
    "current_device",
    "set_device",
    "get_rng_state_all",
    "set_rng_state_all",
]


def _map_torch_cuda(state: _CudaState) -> None:
    """Replace the functions of `torch.cuda` that have a meaning on the CPU; the others refuse."""
    functions = {name: _return(answer) for name, answer in _ANSWERS.items()}
    functions |= _REPLACEMENTS
    functions |= {name: getattr(state, name) for name in _ANSWERED_BY_STATE}
    for name, function in functions.items():
        if hasattr(torch.cuda, name):
            setattr(torch.cuda, name, function)
    # the stub has a tuple of one generator
    torch.cuda.default_generators = (_DEFAULT_GENERATOR,) * state.count  # type: ignore[assignment]
    # c10d writes it to its log when a collective fails
    torch.cuda.nccl.version = _return((0, 0, 0))
    _torch.set_cuda_initialization(_refuse)


def _map_methods_of_tensors() -> None:
    """Replace the methods of tensors that are only there for CUDA."""
    methods: dict[str, Callable[..., Any]] = {
        "cuda": lambda tensor, *args, **kwargs: tensor,
        "pin_memory": lambda tensor, device=None: tensor,
        "is_pinned": lambda tensor, device=None: False,
        "record_stream": lambda tensor, stream: None,
    }
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)


def _map_parameters() -> None:
    """Map the devices among the parameters of functions and classes that no mode observes."""
    _map_parameter(torch.autocast, "__init__", "device_type", 1)
    _map_parameter(_torch.device_mesh_class(), "__init__", "device_type", 1)
    _map_parameter(torch.amp.GradScaler, "__init__", "device", 1, default="cpu")
    _map_parameter(torch, "load", "map_location", 1, default="cpu")
    _map_parameter(torch, "is_autocast_enabled", "device_type", 0, default="cpu")
    _map_parameter(torch, "get_autocast_dtype", "device_type", 0)
    _map_parameter(torch, "set_autocast_dtype", "device_type", 0)
    _map_parameter(torch, "set_autocast_enabled", "device_type", 0)
    original = DistributedDataParallel.__init__

    @wraps(original)
    def construct(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        # torch refuses device_ids and output_device, the first two, for a module on the CPU
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        original(self, module, None, None, *args[2:], **kwargs)

    DistributedDataParallel.__init__ = construct  # type: ignore[method-assign]  # as above


def _map_parameter(
    owner: Any, name: str, parameter: str, position: int, *, default: str | None = None
) -> None:
    """Map the device in one parameter of a function.

    Args:
        owner: the module or class that has the function.
        name: the name of the function.
        parameter: the name of the parameter.
        position: its index among the positional arguments.
        default: a device for calls without the parameter; None to leave torch's default.
    """
    original = getattr(owner, name)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        mapped = list(args)
        if parameter in kwargs:
            kwargs[parameter] = map_device(kwargs[parameter])
        elif len(args) > position:
            mapped[position] = map_device(args[position])
        elif default is not None and len(args) == position:
            mapped.append(default)
        return original(*mapped, **kwargs)

    setattr(owner, name, call)
