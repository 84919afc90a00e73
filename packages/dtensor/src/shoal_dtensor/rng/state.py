"""The state that draws depend on: the random mode, and generators on which ranks must agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_mesh import DeviceMesh, purpose
from shoal_mesh.errors import NoGroupError
from shoal_mesh.internal import ScopedValue, in_lockstep, module_of

from .._torch.interception import checkpoints, recomputed_in
from .._torch.operators import out_of_sight
from ..argument_types import suggests_keywords
from ..errors import ArgumentValueError, RandomStateError
from ..host_memory import device_of_numbers, upload
from ..rows_of_ranks import in_other_threads, one_thread_at_a_time, rows_of_ranks

Mode = Literal["single_device", "counter", "per_axis", "local"]


@dataclass(frozen=True, slots=True)
class RandomMode:
    """A mode and, for "per_axis", the mesh axes that have streams of their own."""

    mode: Mode = "single_device"
    # names or indices, as in the arguments of `random_mode`
    axes: tuple[int | str, ...] = ()
    # the activation checkpoints that were running when a block entered the mode; None if the mode
    # was not entered by a block
    outside: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)

    def hold_in_recomputation(self) -> None:
        """Apply this mode also when backward recomputes a checkpoint inside the block."""
        if self.outside is not None:
            recomputed_in(self, partial(_current.entered, self), self.outside)


_DEFAULT = RandomMode()
_current = ScopedValue("shoal_dtensor_random_mode", _DEFAULT)
current_mode: Callable[[], RandomMode] = _current.get


def _check_mode(mode: Mode, axes: Sequence[int | str]) -> RandomMode:
    """Return a mode; raise ArgumentValueError for an unknown name or axes that do not fit."""
    if mode not in get_args(Mode):
        raise ArgumentValueError(
            f"random mode: expected one of {', '.join(get_args(Mode))}, got {mode!r}"
        )
    if bool(axes) != (mode == "per_axis"):
        raise ArgumentValueError(
            f"random mode {mode!r}: axes must be passed for 'per_axis' and for no other mode, got "
            f"{list(axes)}"
        )
    return RandomMode(mode, tuple(axes))


@suggests_keywords()
def set_random_mode(mode: Mode, axes: Sequence[int | str] = ()) -> None:
    """Set the random mode of this thread: arguments and errors as for `random_mode`.

    Example:
        >>> set_random_mode("local")
        >>> set_random_mode("single_device")
    """
    _current.set(_check_mode(mode, axes))


def get_random_mode() -> Mode:
    """Return the name of the mode that is in force in this thread; see `random_mode`."""
    return _current.get().mode


def draws_at_once(device_type: str) -> bool:
    """Tell whether a draw can be traced with symbolic sizes.

    In other modes and on other devices, the start of a shard in the stream must be an integer.
    """
    mode = current_mode().mode
    return mode == "local" or (mode == "single_device" and device_type == "cpu")


@contextmanager
@suggests_keywords()
def random_mode(mode: Mode, axes: Sequence[int | str] = ()) -> Iterator[None]:
    """Make random operators on sharded tensors draw by `mode` inside the block; blocks nest.

    Code that `torch.utils.checkpoint` runs again in backward draws by the mode of its first run;
    otherwise a backward pass draws by the mode in which it is started.

    Args:
        mode: "single_device": the values that one device would have drawn, bit for bit, on any mesh
            (the default). "counter": values that follow from the generator's state and the
            element's global index alone; they differ from the values of one device, but are the
            same on every mesh and on CPU and CUDA, at a cost that depends on the shard only.
            "per_axis": every coordinate of `axes` has a stream of its own; over the other axes the
            values are drawn as on one device. An axis that does not shard a tensor does not change
            its values, so replicas stay equal. "local": every rank draws its own part from its own
            generator, and nothing is checked.
        axes: mesh axes for "per_axis", by name or index; a mesh without any of these axes draws as
            on one device.

    Raises:
        ArgumentValueError: if the mode is unknown, or axes are missing for "per_axis" or given for
            another mode.

    Example:
        >>> with random_mode("per_axis", axes=("dp",)):
        ...     current_mode().axes
        ('dp',)
    """
    entered = replace(_check_mode(mode, axes), outside=tuple(checkpoints()))
    with _current.change(lambda _: entered):
        yield


# --- generators -----------------------------------------------------------------------------------

_PURPOSE = (
    "the check at the first draw that generators agree; call check_random_state(mesh) to run it "
    "earlier"
)
_NO_GENERATORS = (
    "random numbers on {}: torch's module for this device does not have default_generators, so "
    "ranks cannot agree on a state"
)
# For each mesh and each compared state, the default group in which the ranks last agreed. In
# another default group some ranks may be new.
_in_step: WeakKeyDictionary[DeviceMesh, dict[str, Callable[[], object]]] = WeakKeyDictionary()


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default generator of a device; raise an error if torch does not expose it."""
    if device.type == "cpu":
        return torch.default_generator
    if not has_generators(device.type):
        raise RandomStateError(_NO_GENERATORS.format(device))
    # The device of a tensor always has an index.
    generator: torch.Generator = module_of(device.type).default_generators[device.index]
    return generator


def has_generators(device_type: str) -> bool:
    """Tell whether torch exposes the generators of a device type: cpu, cuda, xpu, but not meta."""
    return device_type == "cpu" or hasattr(module_of(device_type), "default_generators")


def key_of(generator: torch.Generator | None) -> tuple[int, int]:
    """Return two 32-bit words that follow from a generator's state; advance it by one draw."""
    # The default is the generator of the CPU for tensors on all devices, so that a program draws
    # the same keys on CPU and CUDA.
    if generator is None or generator.device.type == "cpu":
        drawn = torch.empty(2, dtype=torch.int64, device="cpu")
        words = drawn.random_(0, 1 << 32, generator=generator).tolist()
        return words[0], words[1]
    if generator.device.type == "cuda":
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        state = f"{generator.initial_seed()} {offset}".encode()
    else:
        # How this generator advances is not known, so use its whole state, and draw one number.
        state = bytes(generator.get_state().tolist())
        torch.empty(1, device=generator.device).uniform_(generator=generator)
    number = _hash(state)
    return number & 0xFFFFFFFF, number >> 32


def _hash(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")


def check_in_step(mesh: DeviceMesh, generator: torch.Generator, *, always: bool = False) -> None:
    """Raise on every rank of `mesh` unless all have the same generator state.

    The ranks compare (one all-gather of 8 bytes) at the first call for a mesh, at every call inside
    a `lockstep()` block, and with `always`. A mesh without process groups, or that this rank is not
    in, is not checked. Threads other than the main one may call in any order, so for these the
    first call with each generator is checked: for the default generator, which threads share, the
    seeds are compared, for any other generator its states.
    """
    if mesh.get_coordinate() is None or mesh.size() == 1:
        return
    always = always or in_lockstep()
    try:
        # The name of the compared state. In the main thread one check is enough for all generators.
        about = ""
        if in_other_threads(mesh):
            shared = generator is generator_of(generator.device)
            about = _SHARED if shared else f"a generator of seed {generator.initial_seed()}"
        if _is_checked(mesh, about) and not always:
            return
        with purpose(_PURPOSE), one_thread_at_a_time(mesh, lambda: about):
            # Another thread may have checked in the meantime.
            if _is_checked(mesh, about) and not always:
                return
            # The shifts make the numbers fit into an int64.
            if about == _SHARED:
                own_digest = generator.initial_seed() >> 1
            else:
                own_digest = _hash(bytes(generator.get_state().tolist())) >> 2
            with out_of_sight():
                comm = mesh.comm(tuple(range(mesh.ndim)))
                sent = upload([own_digest], device_of_numbers(comm, mesh.device_type))
            rows = rows_of_ranks(mesh, lambda: about, sent)
            digests = [digest for (digest,) in rows]
            if len(set(digests)) > 1:
                raise RandomStateError(_describe(mesh, digests, generator))
            _note_checked(mesh, about)
    except NoGroupError:
        return


_SHARED = "the default generator"


def _is_checked(mesh: DeviceMesh, about: str) -> bool:
    checked_under = _in_step.get(mesh, {}).get(about)
    return checked_under is not None and checked_under() is dist.group.WORLD


def _note_checked(mesh: DeviceMesh, about: str) -> None:
    """Note that the ranks of a mesh agree, in the present default group."""
    world = dist.group.WORLD
    checked_under: Callable[[], object] = (lambda: None) if world is None else ref(world)
    _in_step.setdefault(mesh, {})[about] = checked_under


def count_as_checked(mesh: DeviceMesh) -> None:
    """Do not check a mesh at its first random operator, because its ranks are known to agree."""
    for about in "", _SHARED:
        _note_checked(mesh, about)


def check_all_meshes_again() -> None:
    """Check every mesh again at its next random operator, also the meshes that were checked."""
    _in_step.clear()


def _describe(mesh: DeviceMesh, digests: Sequence[int], generator: torch.Generator) -> str:
    """Return the text of the error for generators that are out of step."""
    groups: dict[int, list[int]] = {}
    for rank, value in zip(mesh.mesh.flatten().tolist(), digests, strict=True):
        groups.setdefault(value, []).append(rank)
    agreeing = "; ".join(f"ranks {ranks} agree" for ranks in groups.values())
    return (
        f"random numbers on the mesh of shape {tuple(mesh.shape)} (axes "
        f"{', '.join(mesh.axis_names)}): the "
        f"{generator.device} generators are out of step: {agreeing}. Every rank must draw from the "
        "same state: call "
        "shoal_dtensor.manual_seed(seed, mesh) or torch.manual_seed(seed) with one seed on every "
        "rank, and use "
        'random_mode("per_axis", axes=...) where ranks shall differ'
    )


@suggests_keywords()
def get_rng_state(device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Return the states of the default generators, as plain tensors for a checkpoint.

    In the default mode every rank has the same state, so one rank's copy serves any number of
    ranks.

    Args:
        device: the device to save besides the CPU, under the name of its type; this rank's
            accelerator, if there is one, when left out.

    Raises:
        RandomStateError: torch does not expose the generator of the device.

    Example:
        >>> state = get_rng_state("cpu")
        >>> first = torch.rand(2)
        >>> set_rng_state(state, "cpu")
        >>> torch.equal(torch.rand(2), first)
        True
    """
    state = {"cpu": torch.default_generator.get_state()}
    beside = _beside_the_cpu(device)
    if beside is not None:
        device_type, module = beside
        state[device_type] = module.get_rng_state(device_type if device is None else device)
    return state


@suggests_keywords()
def set_rng_state(state: Mapping[str, Tensor], device: torch.device | str | None = None) -> None:
    """Restore the result of `get_rng_state`; ignore the parts of devices that are not present.

    Args:
        state: the states by type of device.
        device: the device to restore besides the CPU; this rank's accelerator when left out.

    Raises:
        RandomStateError: if the state does not have a CPU part, or torch does not expose the
            generator of the device.

    Example:
        >>> set_rng_state(get_rng_state("cpu"), "cpu")
    """
    if "cpu" not in state:
        raise RandomStateError(
            f"set_rng_state: expected a state with the key 'cpu', got {sorted(state)}"
        )
    torch.default_generator.set_state(state["cpu"])
    beside = _beside_the_cpu(device)
    if beside is not None and beside[0] in state:
        device_type, module = beside
        module.set_rng_state(state[device_type], device_type if device is None else device)


def _beside_the_cpu(device: torch.device | str | None) -> tuple[str, Any] | None:
    """Return the type of a present device besides the CPU, and torch's module for it.

    A requested device must have generators.
    """
    chosen: torch.device | None
    if device is None:
        chosen = torch.accelerator.current_accelerator(check_available=True)
    else:
        chosen = torch.device(device)
    if chosen is None or chosen.type == "cpu":
        return None
    if not has_generators(chosen.type):
        if device is None:
            return None
        raise RandomStateError(_NO_GENERATORS.format(chosen))
    module = module_of(chosen.type)
    return (chosen.type, module) if module.is_available() else None
