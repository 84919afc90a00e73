"""The folder of a run: which steps it holds whole, and how one comes in and goes; no communication.

A step is a folder with the files of torch.distributed.checkpoint and a manifest of their sizes and digests. It is
written under a name that begins with a dot and renamed when it is complete, so what has its name is whole or was
damaged later. It is removed under such a name too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ..errors import CheckpointError

_MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d+)")
Files = dict[str, tuple[int, str]]


class StoredSteps:
    """The steps in a folder.

    Attributes:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def numbers(self) -> list[int]:
        """The steps that have been completed, newest first."""
        if not self.folder.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def path(self, step: int) -> Path:
        """The folder of a completed step."""
        return self.folder / f"step_{step}"

    def partial(self, step: int) -> Path:
        """The folder in which a step is written."""
        return self.folder / f".partial_{step}"

    def begin(self, step: int) -> None:
        """An empty folder to write a step in."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.partial(step), ignore_errors=True)
        self.partial(step).mkdir()

    def complete(self, step: int, files: Mapping[str, tuple[int, str]]) -> None:
        """Write the manifest, and give the step its name."""
        partial = self.partial(step)
        with open(partial / _MANIFEST, "w") as file:
            json.dump({"step": step, "files": files}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        os.rename(partial, self.path(step))
        _sync(self.folder)

    def remove_all_but(self, keep: int) -> None:
        """Remove what is older than the newest steps, and what was left half written or half removed."""
        for step in self.numbers()[keep:]:
            os.rename(self.path(step), self.folder / f".removed_{step}")
        for entry in self.folder.iterdir():
            if entry.name.startswith((".partial_", ".removed_")):
                shutil.rmtree(entry)

    def manifest(self, step: int) -> Files:
        """Size and digest of each file of a step.

        Raises:
            CheckpointError: there is no manifest, it is broken, or it names a file outside of its folder.
        """
        try:
            manifest = json.loads((self.path(step) / _MANIFEST).read_text())
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"step {step} has no manifest that can be read: {error!r}") from error
        if manifest["step"] != step or ".metadata" not in files or any(Path(name).name != name for name in files):
            raise CheckpointError(f"the manifest of step {step} is of another step, or names files elsewhere")
        return files

    def check(self, step: int, index: int = 0, count: int = 1) -> None:
        """See that part `index` of `count` of a step's files have the sizes and digests of its manifest.

        Raises:
            CheckpointError: one has not.
        """
        for name, (size, digest) in sorted(self.manifest(step).items())[index::count]:
            path = self.path(step) / name
            try:
                actual = digest_of(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if actual != (size, digest):
                raise CheckpointError(f"{path} is not what was written: {actual[0]} bytes instead of {size}, or others")


def digest_of(path: Path) -> tuple[int, str]:
    """Size and digest of a file, as it can be read."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16))
        return file.tell(), digest.hexdigest()


def _sync(folder: Path) -> None:
    """Have the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
