"""SavedNames: names of a checkpoint's entries as a tree, and small values that loads read first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

# Keys that lead to a value in nested mappings and lists; an integer is a position in a list.
Path = tuple[str | int, ...]

# A load does not build longer lists than this, whatever positions a file names.
_LONGEST_LIST = 1_000_000


class SavedName(str):
    """Name of an entry of a checkpoint: the leaf of a tree of names."""


class Leaf(NamedTuple):
    """A value that is not taken apart, and its place in the containers of a state dict."""

    path: Path
    container: Any
    key: Any
    value: Any


def name_of(path: Path) -> str:
    """Return the name of an entry in the files, as torch.distributed.checkpoint joins it."""
    return ".".join(map(str, path))


def leaves_of(value: Any, path: Path = ()) -> Iterator[Leaf]:
    """Yield the values that torch.distributed.checkpoint writes as entries, in its order.

    It takes apart every mapping, and lists that hold tensors or mappings. Empty mappings do not
    have an entry there; here each is a leaf, so that a load can report the entries that it would
    drop.
    """
    is_mapping = isinstance(value, Mapping)
    items: Iterable[Any] = value.items() if is_mapping else enumerate(value)
    for key, item in items:
        key_in_path = str(key) if is_mapping else key
        item_path = (*path, key_in_path)
        if is_taken_apart(item):
            yield from leaves_of(item, item_path)
        else:
            yield Leaf(item_path, value, key, item)


def is_taken_apart(value: Any) -> bool:
    """Tell whether the value is a container with entries of its own in a checkpoint."""
    if isinstance(value, Mapping):
        return len(value) > 0
    if not isinstance(value, list):
        return False
    return any(isinstance(item, Tensor | Mapping) or is_taken_apart(item) for item in value)


def is_empty_mapping(value: Any) -> bool:
    """Tell whether the value is a mapping that leaves no trace in a checkpoint."""
    return isinstance(value, Mapping) and not value


class SavedNames:
    """Names of a checkpoint's entries.

    Attributes:
        kinds: metadata of each entry by its name.
        paths: the keys that lead to each entry, by its name.
        read_value: reads one entry that is not a tensor.
    """

    def __init__(self, metadata: Metadata, read_value: Callable[[str], Any]) -> None:
        self.kinds = metadata.state_dict_metadata
        self.read_value = read_value
        is_mapping = isinstance(metadata.planner_data, dict)
        written_paths: dict[str, Any] = metadata.planner_data if is_mapping else {}
        self.paths: dict[str, Path] = {}
        for name in self.kinds:
            path: Any = written_paths.get(name)
            self.paths[name] = path if _is_path(path, name) else (name,)

    def is_tensor(self, name: str) -> bool:
        """Tell whether the entry is a tensor."""
        return isinstance(self.kinds[name], TensorStorageMetadata)

    def under(self, prefix: Path) -> dict[str, Path]:
        """Return the entries below a prefix: their names, with the keys that follow the prefix."""
        length = len(prefix)
        below = {}
        for name, path in self.paths.items():
            if len(path) > length and path[:length] == prefix:
                below[name] = path[length:]
        return below

    def tree(self, prefix: Path) -> Any:
        """Return the containers below a prefix as saved, with a `SavedName` for each entry."""
        root: dict[Any, Any] = {}
        for name, path in self.under(prefix).items():
            insert(root, path, SavedName(name))
        return root


def _is_path(path: Any, name: str) -> bool:
    """Tell whether the path from a file leads to an entry of this name, by keys of a program."""
    if not isinstance(path, tuple) or name_of(path) != name:
        return False
    positions = [key for key in path if not isinstance(key, str)]
    return all(isinstance(key, int) and 0 <= key < _LONGEST_LIST for key in positions)


def insert(root: Any, path: Path, value: Any) -> None:
    """Put a value at a path in nested mappings and lists, and make missing containers."""
    container: Any = root
    key: Any
    for key, following_key in pairwise(path):
        if isinstance(container, list):
            container.extend([None] * (int(key) + 1 - len(container)))
            if container[key] is None:
                container[key] = [] if isinstance(following_key, int) else {}
            container = container[key]
        else:
            made: Any = [] if isinstance(following_key, int) else {}
            container = container.setdefault(key, made)
    last = path[-1]
    if isinstance(container, list):
        container.extend([None] * (int(last) + 1 - len(container)))
    container[last] = value


def value_at(root: Any, path: Path) -> Any:
    """Return the value at a path, with keys compared as text; None if the path leads nowhere."""
    value = root
    for key in path:
        if isinstance(value, Mapping):
            by_text = {str(existing): existing for existing in value}
            if str(key) not in by_text:
                return None
            value = value[by_text[str(key)]]
        elif isinstance(value, list | tuple) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def shorten(values: Sequence[Any]) -> str:
    """Return the first of some values for a message, with the number of the rest."""
    rest = ""
    if len(values) > 5:
        rest = f" and {len(values) - 5} more"
    return ", ".join(map(str, values[:5])) + rest
