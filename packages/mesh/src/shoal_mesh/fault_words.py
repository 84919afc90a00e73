"""Sentences for faults of parallel values, the same in reports of `certify` and of `verify`."""

from __future__ import annotations

from collections.abc import Sequence


def missing_all_reduce(axes: Sequence[str], operation: str = "sum", where: str = "") -> str:
    """Describe a value that equals the value of one device after a reduction over axes.

    Args:
        axes: names of the mesh axes.
        operation: the reduction, with its weights if they differ.
        where: the place whose output is partial, if it is another one.

    Example:
        >>> missing_all_reduce(["tp"])
        'missing all-reduce over tp: it is right after a sum over tp'
        >>> missing_all_reduce(["dp", "tp"], "mean")
        'missing all-reduce over dp, tp: it is right after a mean over dp, tp'
        >>> missing_all_reduce(["tp"], where="mlp.down")
        'missing all-reduce over tp after mlp.down, whose output is right after a sum over tp'
    """
    over = ", ".join(axes)
    value = f" after {where}, whose output is" if where else ": it is"
    return f"missing all-reduce over {over}{value} right after a {operation} over {over}"


def too_large(number: int, axes: Sequence[str], loss: str = "", sign: str = "") -> str:
    """Describe a value that is the value of one device times the size of axes.

    Args:
        number: the size of the axes.
        axes: names of the mesh axes.
        loss: how the losses of the ranks give the loss of one device: "mean", "sum", "equal" or ""
            if it is not known.
        sign: text about the sign, or "".

    Example:
        >>> too_large(2, ["dp"], "mean")
        '2 times too large: mean taken as sum over dp'
        >>> too_large(4, ["tp"], "equal")
        '4 times too large: reduced twice over tp'
    """
    over = ", ".join(axes)
    causes = {
        "mean": f"mean taken as sum over {over}",
        "": f"reduced twice over {over}, or mean taken as sum over {over}",
    }
    cause = causes.get(loss, f"reduced twice over {over}")
    return f"{times_too(number, 'large', sign)}: {cause}"


def too_small(number: int, axes: Sequence[str], loss: str = "", sign: str = "") -> str:
    """Describe a value that is the value of one device divided by the size of axes.

    Args:
        number: the size of the axes.
        axes: names of the mesh axes.
        loss: how the losses of the ranks give the loss of one device: "mean", "sum", "equal" or ""
            if it is not known.
        sign: text about the sign, or "".

    Example:
        >>> too_small(2, ["dp"], "mean")
        '2 times too small: averaged twice over dp'
        >>> too_small(2, ["tp"])
        '2 times too small: averaged twice over tp, or sum taken as mean over tp'
    """
    over = ", ".join(axes)
    causes = {
        "mean": f"averaged twice over {over}",
        "": f"averaged twice over {over}, or sum taken as mean over {over}",
    }
    cause = causes.get(loss, f"sum taken as mean over {over}")
    return f"{times_too(number, 'small', sign)}: {cause}"


def times_too(number: int, direction: str, sign: str = "") -> str:
    """Describe a factor: `2 times too large`, with a text about the sign if there is one.

    Args:
        number: the factor.
        direction: "large" or "small".
        sign: text about the sign, or "".

    Example:
        >>> times_too(2, "large", "with the opposite sign")
        '2 times too large and with the opposite sign'
    """
    text = f"{number} times too {direction}"
    return f"{text} and {sign}" if sign else text
