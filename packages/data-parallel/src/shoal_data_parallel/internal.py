"""For authors of layers: names of this package that the packages above use beside its facade.

They may change with any release; all packages are released together.

May import: units.
"""

from .units.unit import units_of as units_of
