"""The steps of a redistribution, as data.

A step leads from one spec to the next. It records its kind, its mesh axes, its expected time and
the bytes that the busiest rank receives; it does nothing itself. `rank_step` turns a step into
the work of one rank, `run_plan` executes it, `explain` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal_mesh.internal import html_text

from ..layout.placements import norm_order

if TYPE_CHECKING:
    from ..layout.spec import Spec


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step: every rank goes from its box under `src` to its box under `dst`.

    Its name is its kind:

        AllGather      S -> R: every rank gets the others' boxes over `axes`, which shard `dims`
        ReduceScatter  P -> S: reduce over `axes`, each rank keeping its part of `dims`
        AllReduce      P -> R: reduce over `axes`, every rank keeping all
        AllToAll       S(i) -> S(j), all shards equally large; `dims` are i and j
        Exchange       any sharding -> any sharding: one all-to-all of only the missing elements
        Transfer       any sharding on a mesh -> any on another: an exchange among ranks of both

    and without communication:

        Slice          R -> S: each rank keeps its own part
        MakePartial    R or S -> P: a rank's values in place, elsewhere a reduction's neutral value
        Scale          P(sum) <-> P(avg): multiply by the number of ranks (`factor`) or divide by it
        Reshape        the same elements under another shape, which folds dims or unfolds them
    """

    name: str
    src: Spec
    dst: Spec
    # mesh axes that it works over; for a collective, in the order of its blocks
    axes: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()  # tensor dims whose sharding changes
    seconds: float = 0.0  # expected time
    bytes: int = 0  # received by the busiest rank
    # expected memory at its worst moment, input and output included
    peak_bytes: int = 0
    op: str = ""  # the reduction, if the step reduces
    # A Scale multiplies by it. P(sum) -> P(avg) over 2 ranks: 2, because the average of 2a and 2b
    # is a + b.
    factor: int = 1
    # A Scale or a reduction divides by it. P(avg) -> P(sum) over 2 ranks: 2. A reduction of sums
    # over 2 ranks and averages over 4 ranks at once adds up all 8 values and divides by 4.
    divisor: int = 1
    # global ranks that take part in a transfer, ascending
    ranks: tuple[int, ...] = ()

    @property
    def communicates(self) -> bool:
        """True if ranks exchange data in the step."""
        return self.name in _COMMUNICATING

    def detail(self) -> str:
        """Return the arguments of the step in words, for reports."""
        divisor = f"/{self.divisor}" if self.divisor != 1 else ""
        match self.name:
            case "AllGather":
                return f" dims {list(self.dims)}"
            case "ReduceScatter" | "AllReduce":
                dims = f" dims {list(self.dims)}" if self.dims else ""
                division = f" / {self.divisor}" if divisor else ""
                return f" {self.op}{dims}{division}"
            case "AllToAll":
                return f" dim {self.dims[0]} -> {self.dims[1]}"
            case "Transfer":
                return f" among {len(self.ranks)} ranks"
            case "Scale":
                return f" by {self.factor}{divisor}"
        return ""

    def line(self) -> str:
        """Return the step in one line: `AllGather over (tp) dims [0]  3.0 MiB  29.5 us`."""
        names = [self.src.mesh.axis_names[axis] for axis in self.axes]
        over = f" over ({', '.join(names)})" if names else ""
        head = f"{self.name}{over}{self.detail()}"
        if not self.communicates:
            return f"{head}  local"
        return f"{head}  {format_bytes(self.bytes)}  {format_seconds(self.seconds)}"


_COMMUNICATING = frozenset(
    {"AllGather", "ReduceScatter", "AllReduce", "AllToAll", "Exchange", "Transfer"}
)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The steps that redistribute `src` to `dst`, and their expected cost."""

    src: Spec
    dst: Spec
    # in order of execution; empty if no rank has to change its local tensor
    steps: tuple[Step, ...]
    seconds: float  # expected time
    # received by the busiest rank, over all steps
    bytes_sent: int
    # expected memory at the worst moment, the source shard included
    peak_bytes: int
    # Lower bound, in the cost model, on the seconds of every plan from `src` to `dst`. It is
    # `seconds` if no plan is faster. It is 0.0 if no bound was computed: between meshes, and
    # where a strided dim is gathered first.
    floor: float = 0.0
    collectives: int = field(init=False, repr=False)  # number of steps that communicate
    purpose: str = field(init=False, repr=False)  # the purpose of its collectives, in words
    # for the recorder: `purpose` and `collectives`; None if no step communicates
    note: tuple[str, int] | None = field(init=False, repr=False)
    # `src.example`: not None if sizes are symbols (see `Spec`)
    example: Spec | None = field(init=False, repr=False)
    # whether the tensor to redistribute holds partial norms
    starts_at_norm: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "example", self.src.example)
        put(self, "collectives", sum(step.communicates for step in self.steps))
        put(self, "purpose", f"redistribute {self.src!r} -> {self.dst!r}")
        put(self, "note", (self.purpose, self.collectives) if self.collectives else None)
        put(self, "starts_at_norm", is_norm(self.src))

    @property
    def slices(self) -> bool:
        """True if the result of the steps may be a view of an earlier tensor."""
        # Only Slice and Reshape return views. Example: AllReduce, Slice, Reshape.
        without_reshapes = [step for step in self.steps if step.name != "Reshape"]
        return not without_reshapes or without_reshapes[-1].name == "Slice"

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __str__(self) -> str:
        head = f"{layout(self.src)} -> {layout(self.dst)}: "
        if not self.steps:
            return head + "nothing to do"
        cost = f"{format_bytes(self.bytes_sent)}, {format_seconds(self.seconds)}"
        total = f"{cost}, peak {format_bytes(self.peak_bytes)}"
        lines = [f"  {step.line()}" for step in self.steps]
        return "\n".join([head + total, *lines])


def is_norm(spec: Spec) -> bool:
    """Tell whether a tensor holds partial norms."""
    if not spec.partials:
        return False
    _, first_op = spec.partials[0]
    return norm_order(first_op) is not None


def layout(spec: Spec) -> str:
    """Return the placements as text, with the shard order where it is not ascending.

    For example `[S(0), S(0)] order 0:(1,0)`.
    """
    text = f"[{', '.join(map(str, spec.placements))}]"
    orders = []
    for dim, axes in spec.shard_order:
        if list(axes) != sorted(axes):
            orders.append(f"{dim}:({','.join(map(str, axes))})")
    return f"{text} order {' '.join(orders)}" if orders else text


def format_bytes(count: float) -> str:
    """Format a number of bytes for people.

    Example:
        >>> format_bytes(512), format_bytes(3 * 2**20)
        ('512 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    if unit == "B":
        return f"{count:.0f} B"
    return f"{count:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a time for people: `2.5 us`, `250.0 ms`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
