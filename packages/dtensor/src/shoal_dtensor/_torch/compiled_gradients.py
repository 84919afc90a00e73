"""Gradients of compiled functions' outputs, converted to the class that compiled code expects.

Compiled code expects a gradient of the output's class for every output. A plain gradient is
converted to that class. For an output that the loss does not depend on, autograd would make a plain
tensor of zeros with the global shape. Here autograd is made to pass None instead, and the zeros are
made in the class and layout that the compiled code expects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .interception import call_after_import

# (plain gradient, context from the output's `__tensor_flatten__`) -> gradient of the class
Convert = Callable[[torch.Tensor, Any], Any]
# (shape, context from the output's `__tensor_flatten__`) -> zeros of the class
MakeZeros = Callable[[Sequence[int], Any], Any]

_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"
# An attribute that marks zeros in place of a missing gradient. The ranks need not compare them.
_IS_MISSING = "_shoal_is_missing"


def convert_compiled_gradients(
    cls: type[torch.Tensor], *, convert_plain: Convert, make_zeros: MakeZeros
) -> None:
    """Convert gradients of compiled functions' outputs of a class to tensors of the class.

    Args:
        cls: a subclass of tensors that torch.compile flattens.
        convert_plain: makes a tensor of the class from a plain gradient, such as one that a hook
            returns.
        make_zeros: makes zeros of the class for an output without a gradient.
    """

    # The module is not imported here, because this takes a second. It is changed when torch
    # imports it.
    def wrap(module: Any) -> None:
        passes = module.AOTDispatchAutograd
        process = passes.process_runtime_tangent

        def process_converted(tangent: Any, meta: Any, *args: Any, **kwargs: Any) -> Any:
            expected = getattr(meta, "original_subclass_type", None)
            if expected is cls and not isinstance(tangent, cls | FakeTensor):
                if tangent is None or hasattr(tangent, _IS_MISSING):
                    # None arrives only in compiled autograd, which does not run `_backward_of_all`.
                    shape = meta.outer_size if tangent is None else tangent.shape
                    tangent = make_zeros(shape, meta.meta)
                else:
                    tangent = convert_plain(tangent, meta.meta)
            return process(tangent, meta, *args, **kwargs)

        passes.process_runtime_tangent = staticmethod(process_converted)
        passes.post_compile = staticmethod(partial(_post_compile, passes.post_compile, cls))

    call_after_import(_RUNTIME, wrap)


def _post_compile(original: Any, cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Finish compiling a function as torch does; its backward receives missing gradients."""
    run = original(*args, **kwargs)

    @wraps(run)
    def run_compiled(*inputs: Any) -> Any:
        outputs = run(*inputs)
        _prepare_backward(cls, outputs)
        return outputs

    return run_compiled


def _prepare_backward(cls: type[torch.Tensor], outputs: Sequence[Any]) -> None:
    """Make autograd pass None, in place of zeros, to the node that computed the outputs."""
    for output in outputs:
        node: Any = output.grad_fn if isinstance(output, cls) else None
        function: Any = getattr(node, "_forward_cls", None)
        # The node of an output that is a view is not the node of the compiled function.
        if not hasattr(function, "_aot_id"):
            continue
        # Remove hooks that were registered before autograd gave the output its node. Torch would
        # add later hooks to them and then call none of them.
        output._backward_hooks = None
        node.set_materialize_grads(False)
        if not isinstance(function.backward, partial):
            function.backward = staticmethod(partial(_backward_of_all, function.backward))


def _backward_of_all(original: Any, node: Any, *gradients: Any) -> Any:
    """Run a compiled backward pass with marked zeros in place of missing gradients."""
    # torch 2.13 passes one list, which the backward pass empties. Older versions pass the gradients
    # as separate arguments.
    is_list = len(gradients) == 1 and isinstance(gradients[0], list)
    found = gradients[0] if is_list else [*gradients]
    for index, gradient in enumerate(found):
        if gradient is None:
            found[index] = _marked_zeros(node._input_metadata[index])
    return original(node, found) if is_list else original(node, *found)


def _marked_zeros(output: Any) -> torch.Tensor:
    """Return marked zeros like an output, which take the memory of one element."""
    zeros = torch.zeros((), dtype=output.dtype, device=output.device).expand(output.shape)
    setattr(zeros, _IS_MISSING, True)
    return zeros
