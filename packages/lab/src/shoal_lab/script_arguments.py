"""Arguments of a script under certification.

A script is certified on several meshes and, after a failure, with smaller sizes, so its arguments
are changed from run to run: `{tp}` stands for the size of the axis tp, and integers are halved. The
report has the command that repeats the smallest run that failed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

# An integer by itself or after the name of an option: 8, --layers=8.
_INTEGER = re.compile(r"(?P<option>-[^=]*=)?(?P<number>\d+)")
# Integers with these words in the names of their options are not sizes.
_NOT_SIZES = ("seed", "port")


def fill_axes(arguments: Sequence[str], axes: Mapping[str, int]) -> tuple[str, ...]:
    """Replace names of axes in braces by the sizes of the axes; other braces stay.

    Args:
        arguments: the arguments of a script.
        axes: sizes by name.

    Example:
        >>> fill_axes(["--tensor-size", "{tp}", "--shape={dp}x{tp}", "{other}"], {"dp": 4, "tp": 2})
        ('--tensor-size', '2', '--shape=4x2', '{other}')
    """
    filled = list[str]()
    for argument in arguments:
        for name, size in axes.items():
            argument = argument.replace(_placeholder(name), str(size))
        filled.append(argument)
    return tuple(filled)


def fixed_axes(arguments: Sequence[str], axes: Mapping[str, int]) -> list[str]:
    """Return the axes whose names in braces no argument has.

    Their sizes cannot be changed, because the script does not get them.

    Args:
        arguments: the arguments of a script.
        axes: sizes by name.

    Example:
        >>> fixed_axes(["--tensor-size", "{tp}"], {"dp": 4, "tp": 2})
        ['dp']
    """
    text = " ".join(arguments)
    return [name for name in axes if _placeholder(name) not in text]


def halve_integers(arguments: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the ways to halve one integer: a text of the change, and all arguments after it.

    Args:
        arguments: the arguments of a script.

    Example:
        >>> list(halve_integers(["--layers", "4", "--seed", "8", "--lr=0.5"]))
        [('--layers 2', ('--layers', '2', '--seed', '8', '--lr=0.5'))]
    """
    for position, argument in enumerate(arguments):
        found = _INTEGER.fullmatch(argument)
        if found is None:
            continue
        # Both `--layers=8` and `--layers 8` are an integer with the name of an option.
        option = found["option"] or ""
        previous = arguments[position - 1] if position else ""
        follows_option = not option and previous.startswith("-")
        name = previous if follows_option else option
        if int(found["number"]) < 2 or any(word in name.lower() for word in _NOT_SIZES):
            continue
        halved = f"{option}{int(found['number']) // 2}"
        change = f"{previous} {halved}" if follows_option else halved
        yield change, (*arguments[:position], halved, *arguments[position + 1 :])


def certify_command(
    script: str, mesh: Mapping[str, int], options: Sequence[str], arguments: Sequence[str]
) -> str:
    """Return the command that certifies a script on a mesh.

    Args:
        script: the path of the script.
        mesh: axis sizes by name. A script that was certified on a number of ranks, without a mesh,
            has the single axis `ranks`.
        options: the options of the command.
        arguments: the arguments of the script.

    Example:
        >>> certify_command("train.py", {"dp": 2, "tp": 1}, [], ["--layers", "2"])
        'python -m shoal_lab certify train.py --mesh dp=2,tp=1 -- --layers 2'
        >>> certify_command("train.py", {"ranks": 2}, ["--dtype", "keep"], [])
        'python -m shoal_lab certify train.py --ranks 2 --dtype keep'
    """
    if tuple(mesh) == ("ranks",):
        axes = ["--ranks", str(mesh["ranks"])]
    else:
        axes = ["--mesh", ",".join(f"{name}={size}" for name, size in mesh.items())]
    words = ["python", "-m", "shoal_lab", "certify", script, *axes, *options]
    if arguments:
        # Without `--`, the command would read an argument of the script that is named like one of
        # its own options, such as `--dtype`.
        words += ["--", *arguments]
    return shlex.join(words)


def _placeholder(name: str) -> str:
    """Return the text that stands for the size of an axis."""
    return f"{{{name}}}"
