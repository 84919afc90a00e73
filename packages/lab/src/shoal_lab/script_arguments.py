"""Arguments of a script that depend on the mesh, such as `{tp}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def fill_axes(arguments: Sequence[str], axes: Mapping[str, int]) -> tuple[str, ...]:
    """Replace names of axes in braces by the sizes of the axes; other braces stay.

    Args:
        arguments: of a script.
        axes: sizes by name.

    Example:
        >>> fill_axes(["--tensor-size", "{tp}", "--shape={dp}x{tp}", "{other}"], {"dp": 4, "tp": 2})
        ('--tensor-size', '2', '--shape=4x2', '{other}')
    """
    filled = list[str]()
    for argument in arguments:
        for name, size in axes.items():
            argument = argument.replace(f"{{{name}}}", str(size))
        filled.append(argument)
    return tuple(filled)
