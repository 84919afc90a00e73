"""Names of this package for the packages above that are not part of its public interface.

They may change with any release; all packages are released together.

May import: manifest.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from .manifest.entries import Entry, entries_of, find_split_parameters
from .manifest.local_boxes import LocalBox, local_boxes
from .manifest.weights import NamedBox, Weight, own_rank, weights_of
