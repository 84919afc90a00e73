"""Dependencies of the package `shoal`: every layer, from the folders beside it or by version.

In a clone the layers are the folders beside this one, so that `pip install ./packages/shoal` needs
no package index. A build for an index sets SHOAL_PINS=1; then, and in an sdist, which has no
folders beside it, the layers are pinned as they pin each other.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class LayersAsDependencies(MetadataHookInterface):
    """Hook of hatchling that fills in `dependencies` from the names of the layers."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dependencies; `layers` of the hook's table has the folders."""
        folders = Path(self.root).parent
        layers: list[str] = self.config["layers"]
        in_a_clone = all((folders / layer / "pyproject.toml").is_file() for layer in layers)
        if in_a_clone and not os.environ.get("SHOAL_PINS"):
            metadata["dependencies"] = [
                f"shoal-{layer} @ {(folders / layer).as_uri()}" for layer in layers
            ]
            return
        bounds = pin(metadata["version"])
        metadata["dependencies"] = [f"shoal-{layer} {bounds}" for layer in layers]


def pin(version: str) -> str:
    """Return the bounds from a version up to the next minor one."""
    major, minor, _ = version.split(".")
    return f">= {version}, < {major}.{int(minor) + 1}"
