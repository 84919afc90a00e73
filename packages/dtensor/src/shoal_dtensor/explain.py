"""Why a redistribution is done as it is: the chosen plan, what was rejected, and what must move at least.

`explain(src, dst)` runs nothing and needs no process group: specs on an `abstract_mesh` do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import MissingExtraError
from .redistribute import Plan, alternatives
from .redistribute.steps import format_bytes, format_seconds, layout
from .redistribute.traffic import least_bytes, plan_traffic
from .spec import Spec

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True)
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

    def __str__(self) -> str:
        head = f"{self.chosen}\n  must move at least {format_bytes(self.least_bytes)} a rank"
        if 0 < self.chosen.floor < self.chosen.seconds * (1 - 1e-9):
            head += f"; the search stopped early: no plan takes less than {format_seconds(self.chosen.floor)}"
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

    def picture(self, ax: Any = None) -> Any:
        """A heat map of who sends how many bytes to whom under the chosen plan.

        Args:
            ax: matplotlib axes to draw on; new ones when left out.

        Returns:
            The axes.

        Raises:
            MissingExtraError: if matplotlib is not installed.
        """
        if ax is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError as error:
                raise MissingExtraError(
                    "picture() draws with matplotlib, which is not installed: pip install shoal-dtensor[viz]"
                ) from error
            _, ax = plt.subplots()
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


def explain(src: Spec, dst: Spec, *, count: int = 4, **options: Any) -> Explanation:
    """The plan from `src` to `dst` and up to `count - 1` runners-up.

    Args:
        src: how the tensor is placed.
        dst: how it shall be placed.
        count: how many plans to show.
        options: `topology`, `memory_limit`, as for `redistribute.plan`.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Partial, Replicate
        >>> src = Spec(abstract_mesh((4, 2), ("dp", "tp")), (Partial(), Replicate()), (1024, 1024))
        >>> why = explain(src, src.with_(placements=(Replicate(), Replicate())))
        >>> why.chosen.seconds <= why.rejected[0].seconds
        True
    """
    chosen, *rejected = alternatives(src, dst, count, **options)
    return Explanation(chosen, tuple(rejected), least_bytes(src, dst))


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
