"""Why a redistribution is done as it is: the chosen plan, what was rejected, and what must move at least.

`explain(tensor, placements)` runs nothing; with specs on an `abstract_mesh` it needs no process group.
"""

from __future__ import annotations

from typing import Any

from shoal_mesh.internal import dataclass

from ..argument_types import check_type
from ..layout.dim_sharding import ShardOrder
from ..layout.partition_spec import Placements
from ..layout.spec import Spec
from ..redistribute.plan import alternatives
from ..redistribute.steps import Plan, format_bytes, format_seconds, layout
from ..redistribute.traffic import least_bytes, plan_traffic
from ..tensor.dtensor import DTensor
from ..tensor.spec_arguments import target_spec
from .pictures import new_axes


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Explanation:
    """The cheapest plans between two specs.

    Attributes:
        chosen: the plan that `redistribute` runs.
        rejected: the runners-up, cheapest first.
        least_bytes: what a rank has to receive at least, averaged over the ranks.
    """

    chosen: Plan
    rejected: tuple[Plan, ...]
    least_bytes: float

    def as_data(self) -> dict[str, Any]:
        """Everything as plain lists, numbers and strings (for JSON)."""
        return {
            "src": layout(self.chosen.src),
            "dst": layout(self.chosen.dst),
            "mesh": dict(zip(self.chosen.src.mesh.axis_names, self.chosen.src.mesh.shape, strict=True)),
            "shape": list(self.chosen.src.shape),
            "least_bytes": self.least_bytes,
            "chosen": _as_data(self.chosen),
            "rejected": [_as_data(plan) for plan in self.rejected],
        }

    def __repr__(self) -> str:
        head = f"{self.chosen}\n  must move at least {format_bytes(self.least_bytes)} a rank"
        if 0 < self.chosen.floor < self.chosen.seconds * (1 - 1e-9):
            head += (
                f"; the search stopped early: an estimate, no plan takes less than {format_seconds(self.chosen.floor)}"
            )
        if not self.rejected:
            return head
        lines = [head, "rejected:"]
        for plan in self.rejected:
            slower = plan.seconds / self.chosen.seconds if self.chosen.seconds else float("inf")
            lines.append(
                f"  {format_seconds(plan.seconds)} ({slower:.2f} x), {format_bytes(plan.bytes_sent)}, "
                f"peak {format_bytes(plan.peak_bytes)}: " + ", then ".join(step.line() for step in plan.steps)
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from html import escape  # 2 ms, for notebooks only

        return f"<pre>{escape(repr(self))}</pre>"

    def picture(self, ax: Any = None) -> Any:
        """A heat map of who sends how many bytes to whom under the chosen plan.

        Args:
            ax: matplotlib axes to draw on; new ones when left out.

        Returns:
            The axes.

        Raises:
            MissingExtraError: if matplotlib is not installed.
        """
        ax = new_axes(ax, 5, 4)
        ranks = self.chosen.src.mesh.size()
        matrix = [[0.0] * ranks for _ in range(ranks)]
        for (sender, receiver), count in plan_traffic(self.chosen).items():
            matrix[sender][receiver] = count / 2**20
        image = ax.imshow(matrix, cmap="viridis", vmin=0.0)
        ax.figure.colorbar(image, ax=ax, label="MiB")
        ax.set_xlabel("to rank")
        ax.set_ylabel("from rank")
        steps = ", ".join(step.name for step in self.chosen.steps) or "nothing to do"
        ax.set_title(f"{layout(self.chosen.src)} -> {layout(self.chosen.dst)}\n{steps}")
        return ax


def explain(
    src: Spec | DTensor,
    dst: Spec | Placements,
    *,
    count: int = 4,
    shard_order: ShardOrder | None = None,
    **options: Any,
) -> Explanation:
    """The plan from `src` to `dst` and up to `count - 1` runners-up; runs nothing.

    Args:
        src: a tensor, or its spec.
        dst: the spec to redistribute to, or the placements, one per mesh axis or as a `PartitionSpec`.
        count: how many plans to show.
        shard_order: with placements, the axes of each dim that several shard, outermost first.
        options: `topology`, `memory_limit` in bytes, as for `redistribute.plan`.

    Raises:
        PlacementError: if the placements do not fit the mesh or the tensor.
        RedistributeError: if the specs describe different tensors, or no plan stays within the memory limit.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Partial, Replicate
        >>> src = Spec(abstract_mesh((4, 2), ("dp", "tp")), (Partial(), Replicate()), (1024, 1024))
        >>> why = explain(src, src.with_(placements=(Replicate(), Replicate())))
        >>> [step.name for step in why.chosen.steps]  # half of it each, over dp, then together over tp
        ['Slice', 'AllReduce', 'AllGather']
    """
    check_type("explain", "src", src, (Spec, DTensor), "a DTensor or its spec")
    source = src.spec if isinstance(src, DTensor) else src
    target = dst if isinstance(dst, Spec) else target_spec(source, None, dst, shard_order)
    chosen, *rejected = alternatives(source, target, count, **options)
    return Explanation(chosen, tuple(rejected), least_bytes(source, target))


def _as_data(plan: Plan) -> dict[str, Any]:
    return {
        "seconds": plan.seconds,
        "floor": plan.floor,
        "bytes": plan.bytes_sent,
        "peak_bytes": plan.peak_bytes,
        "steps": [
            {
                "step": step.name,
                "axes": [step.src.mesh.axis_names[axis] for axis in step.axes],
                "detail": step.detail().strip(),
                "from": layout(step.src),
                "to": layout(step.dst),
                "seconds": step.seconds,
                "bytes": step.bytes,
            }
            for step in plan.steps
        ],
    }
