"""The errors of the dtensor layer, and the errors that layers of parallel modules share.

Each error names the request, the allowed values and the value received. The classes subclass the
builtins that torch raises in the same places, several if torch raises several, so that `except`
clauses keep working.
"""

from __future__ import annotations

from shoal_mesh.internal import replaced_names


class ShoalTensorError(Exception):
    """Base of every error that the dtensor layer raises on purpose."""


class ArgumentTypeError(ShoalTensorError, TypeError, RuntimeError):
    """A function got an argument of a wrong type."""


class ArgumentValueError(ShoalTensorError, ValueError, RuntimeError):
    """A function got an argument that is not among the values allowed."""


class OperatorArgumentError(ShoalTensorError, RuntimeError):
    """An operator refuses its arguments: shapes or dtypes that do not fit."""


class OperatorIndexError(ShoalTensorError, IndexError, RuntimeError):
    """An operator refuses a dim or an index: it is out of range."""


class PlacementError(ShoalTensorError, ValueError, RuntimeError):
    """Placements do not fit the mesh, the tensor or each other."""


class PlacementIndexError(PlacementError, IndexError, AssertionError):
    """A placement for a missing dim or mesh axis, or a wrong number of placements."""


class RedistributeError(ShoalTensorError, ValueError):
    """No plan leads from one spec to the other."""


class NoRuleError(ShoalTensorError, NotImplementedError):
    """An operator without a sharding rule or decomposition, whose inputs must not be replicated."""


class MixedTensorError(ShoalTensorError, RuntimeError):
    """An operator got DTensors together with plain tensors, or DTensors of different meshes."""


class InPlaceError(ShoalTensorError, RuntimeError):
    """A write cannot reach the tensor that it should change."""


class TransformError(ShoalTensorError, NotImplementedError):
    """A transform of torch.func, or forward-mode AD, reached a step that has no rule for it."""


class CommunicationForbiddenError(ShoalTensorError, RuntimeError):
    """An operator would have to communicate inside `communication("forbid")`."""


class RandomStateError(ShoalTensorError, RuntimeError):
    """The ranks' random generators are out of step, so replicas would draw different numbers."""


class StateDictError(ShoalTensorError, RuntimeError):
    """A state dict, or its options, do not fit the model or optimizer; nothing has been loaded."""


class CheckpointError(ShoalTensorError, ValueError, RuntimeError):
    """A checkpoint was not saved, is incomplete, or is refused.

    The error is raised on all ranks, and no checkpoint has been removed.
    """


class SpmdTypeError(ShoalTensorError, RuntimeError):
    """The types of plain local tensors do not fit an operator, a collective or an assertion."""


# --- errors of parallel modules, which the packages above raise -----------------------------------


class StyleError(Exception):
    """Base of every error that the packages of parallel modules raise on purpose."""


class StyleTypeError(StyleError, TypeError):
    """An argument of a public function has a wrong type."""


class PlanError(StyleError, ValueError, RuntimeError):
    """A parallelization plan does not fit a module: unmatched, ambiguous or indivisible entries."""


class LayoutError(StyleError, ValueError, RuntimeError):
    """Layouts do not fit each other, the inputs or the mesh."""


class LayoutTypeError(LayoutError, StyleTypeError):
    """A value that was given as a layout is not a placement."""


class TiedWeightError(PlanError):
    """Modules that share one parameter require different placements of it."""


class UnsupportedModuleError(StyleError, NotImplementedError):
    """This type of module cannot be made parallel; the message names the types that can."""


class SecondOrderError(StyleError, RuntimeError):
    """A local computation was differentiated twice; its backward is not differentiable."""


__getattr__ = replaced_names(__name__, {"OptimizerError": ArgumentTypeError})
