"""The simulated accelerator `sim`: built once, registered with torch, its operations recorded.

Every process with `autoload` (and the root of the repository) on its path registers it when it
imports torch, as the packages of real accelerators do; so do ranks and scripts that it starts.
`python -m integration_tests.device.simulated` builds it, in a minute, once for each torch, and says
why where it cannot.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

# torch is imported in functions: its import calls `register`, which has to be there then.
NAME = "sim"
_SOURCES = sorted((Path(__file__).parent / "simulation").iterdir())
_EXTENSION = "simulated_device"
# Of the frames under an event the innermost of the first kind that there is: who made the device do
# it.
_MAKERS = ("/src/shoal_", "torch/distributed/", "torch/optim/", "torch/nn/", "/integration_tests/")


def library() -> Path:
    """Where the extension is, or will be: it follows from its sources and from torch."""
    import torch

    digest = hashlib.blake2b(f"{torch.__version__} {sys.version}".encode(), digest_size=6)
    for source in _SOURCES:
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shoal" / f"{_EXTENSION}_{digest.hexdigest()}" / f"{_EXTENSION}.so"


def build() -> None:
    """Build the extension where it is not there yet.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    if library().exists():
        return
    from torch.utils import cpp_extension

    library().parent.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        _EXTENSION,
        [str(source) for source in _SOURCES if source.suffix == ".cpp"],
        extra_cflags=["-O1", "-g0", "-std=c++20", "-Wno-attributes"],
        build_directory=str(library().parent),
        is_python_module=False,
    )


def register() -> None:
    """Make `sim` a device of this process, if it is built; called by `import torch`."""
    # functions that it leaves out of its types
    torch: Any = importlib.import_module("torch")

    if not library().exists() or _extension() in sys.modules:
        return
    torch.utils.rename_privateuse1_backend(NAME)
    loader = importlib.machinery.ExtensionFileLoader(_EXTENSION, str(library()))
    spec = importlib.util.spec_from_loader(_EXTENSION, loader)
    assert spec is not None, "made of a loader"
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    sys.modules[_extension()] = extension
    extension.listen(_heard)

    from . import device_module

    torch._register_device_module(NAME, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _register_backend(extension)


def _extension() -> str:
    return f"{__package__}.{_EXTENSION}"


def _register_backend(extension: ModuleType) -> None:
    from torch import distributed
    from torch._C._distributed_c10d import PrefixStore, Store

    dist: Any = distributed

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        return extension.backend(
            dist.ProcessGroupGloo(PrefixStore(NAME, store), rank, size, timeout)
        )

    dist.Backend.register_backend("simccl", create, devices=[NAME])


def is_registered() -> bool:
    """Whether this process has the device."""
    return _extension() in sys.modules


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a program has made the device do.

    Attributes:
        kind: "H2D" and "D2H" are copies that the host waits for, "H2D later" and "D2H later" those
            that it does not; "P2P" copies between devices; "SYNC" any other wait of the host;
            "POLL" a question whether work is done; "COLLECTIVE"; "RACE" memory that was written or
            freed under a collective or a copy; "DROPPED" a collective that nobody has waited for.
        what: which.
        nbytes: of the message.
        line: of shoal, else of torch, that did it.
    """

    kind: str
    what: str
    nbytes: int
    line: str


_watching: list[list[Event]] = []


@contextmanager
def watched() -> Iterator[list[Event]]:
    """What the device is made to do in the block, in all threads, in order."""
    events: list[Event] = []
    _watching.append(events)
    try:
        yield events
    finally:
        _watching.remove(events)


def _heard(kind: str, what: str, nbytes: int) -> None:
    if _watching:
        event = Event(kind, what, nbytes, _line(sys._getframe().f_back))
        for events in _watching:
            events.append(event)


def _line(frame: FrameType | None) -> str:
    frames = []
    while frame is not None and not frame.f_code.co_filename.endswith("local_ranks/worker.py"):
        frames.append(frame)
        frame = frame.f_back
    for maker in _MAKERS:
        for each in frames:
            name = each.f_code.co_filename
            if maker in name:
                return (
                    f"{name[name.rindex(maker) :].removeprefix('/src').lstrip('/')}:{each.f_lineno}"
                )
    return ""


if __name__ == "__main__":
    try:
        build()
    except (RuntimeError, OSError) as error:
        sys.exit(f"the simulated accelerator cannot be built: {error}")
