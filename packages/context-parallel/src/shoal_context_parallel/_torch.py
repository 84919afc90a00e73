"""The seam to torch: every private or unstable torch name that this package alone uses."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import functional

disable_dynamo: Callable[..., Any] = _disable_dynamo
# Context manager: functions of torch skip `__torch_function__` of subclasses of `Tensor`.
without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
# A mask that is added to the scores; None for none.
Mask = Tensor | None
# The output (batch, heads, queries, width), and the log-sum-exp of the scores of each query (batch,
# heads, queries).
Outputs = tuple[Tensor, Tensor]

# --- kernels of attention -------------------------------------------------------------------------

# The kernels below compute attention of tensors (batch, heads, length, width), none of them empty.
#
# A forward takes queries, keys and values, whether it is causal (then there are as many queries as
# keys), the mask that is added to the scores, and the factor of the scores.
#
# A backward takes six tensors in this order: the gradient of the output, the queries, keys and
# values, the output, and the log-sums. The keys may be a part of a longer sequence. The output and
# the log-sums are then the results for the whole sequence.
_aten = torch.ops.aten
_NO_DROPOUT = 0.0


class Gradients(NamedTuple):
    """The gradients of attention's three inputs."""

    queries: Tensor
    keys: Tensor
    values: Tensor


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask, scale: float | None
) -> Outputs:
    """Return output and log-sum-exp of torch's CPU kernel."""
    op = _aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = op(q, k, v, _NO_DROPOUT, causal, attn_mask=mask, scale=scale)
    return out, lse


def flash_attention_backward(*tensors: Tensor, causal: bool, mask: Mask, scale: float) -> Gradients:
    """Return the gradients of torch's CPU kernel.

    The tensors are the gradient of the output, q, k, v, the output, and the log-sums.
    """
    op = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    dq, dk, dv = op(*tensors, _NO_DROPOUT, causal, attn_mask=mask, scale=scale)
    return Gradients(dq, dk, dv)


def cuda_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask, scale: float
) -> Outputs:
    """Return output and log-sum-exp of the CUDA flash kernel, which takes no mask."""
    out, lse, *_ = _aten._scaled_dot_product_flash_attention.default(
        q, k, v, _NO_DROPOUT, causal, scale=scale
    )
    return out, lse


def cuda_flash_attention_backward(
    *tensors: Tensor, causal: bool, mask: Mask, scale: float
) -> Gradients:
    """Return the gradients of the CUDA flash kernel.

    The kernel ignores the strides of the log-sums, so they must be contiguous.
    """
    grad, q, k, v, out, lse = tensors
    op = _aten._scaled_dot_product_flash_attention_backward.default
    # No cumulative lengths of queries and keys, because all sequences have one length. Instead the
    # kernel gets the largest length of each. Without dropout, the random state is not read.
    no_cumulative_lengths = (None, None)
    largest_lengths = (q.shape[-2], k.shape[-2])
    inputs = (grad, q, k, v, out, lse.contiguous(), *no_cumulative_lengths, *largest_lengths)
    dq, dk, dv = op(*inputs, _NO_DROPOUT, causal, *_no_random_state(lse), scale=scale)
    return Gradients(dq, dk, dv)


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask, scale: float
) -> Outputs:
    """Return output and log-sum-exp of the memory-efficient CUDA kernel."""
    op = _aten._scaled_dot_product_efficient_attention.default
    # True: also compute the log-sums.
    out, lse, *_ = op(q, k, v, _expand_mask(mask, q), True, _NO_DROPOUT, causal, scale=scale)
    # The kernel pads the log-sums to a multiple of 32 rows.
    return out, lse.narrow(-1, 0, q.shape[-2])


def efficient_attention_backward(
    *tensors: Tensor, causal: bool, mask: Mask, scale: float
) -> Gradients:
    """Return the gradients of the memory-efficient CUDA kernel."""
    grad, q, k, v, out, lse = tensors
    # The kernel reads a multiple of 32 rows, so log-sums of +inf are added. It computes the softmax
    # as exp(score - log-sum), which is exp(-inf) = 0 in the added rows.
    missing_rows = -lse.shape[-1] % 32
    lse = functional.pad(lse.contiguous(), (0, missing_rows), value=torch.inf)
    aligned_mask = _expand_mask(mask, q)
    inputs = (grad, q, k, v, aligned_mask, out, lse, *_no_random_state(lse))
    # of the queries, keys, values and mask
    needs_grads = [True, True, True, False]
    op = _aten._scaled_dot_product_efficient_attention_backward.default
    dq, dk, dv, _ = op(*inputs, _NO_DROPOUT, needs_grads, causal, scale=scale)
    return Gradients(dq, dk, dv)


def _expand_mask(mask: Mask, q: Tensor) -> Mask:
    """Expand the mask to all batch rows and heads, with rows aligned to 16 elements.

    The kernel requires this alignment.
    """
    if mask is None:
        return None
    columns = mask.shape[-1]
    missing = -columns % 16
    # Example: rows of 10 columns are padded to 16. `narrow` returns a view of the 10 columns, in
    # which each row still begins 16 elements after the row before.
    padded = functional.pad(mask, (0, missing))
    aligned = padded.narrow(-1, 0, columns)
    return aligned.expand(*q.shape[:2], -1, -1)


def _no_random_state(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a seed and an offset for a kernel without dropout."""
    # shapes and dtypes of the CUDA kernels; the elements are not read
    seed = like.new_empty(2, dtype=torch.uint64)
    offset = like.new_empty((), dtype=torch.uint64)
    return seed, offset


def can_use(kernel: str, q: Tensor, v: Tensor) -> bool:
    """Tell whether torch uses a CUDA kernel on this device and under `sdpa_kernel`.

    Args:
        kernel: "flash" or "efficient".
        q: queries; keys have their shape.
        v: values.
    """
    cuda: Any = torch.backends.cuda
    # `q` also stands for the keys. `AttentionKernel.takes` checks the mask itself.
    no_mask = None
    is_causal = False
    enable_gqa = False
    parameters = cuda.SDPAParams(q, q, v, no_mask, _NO_DROPOUT, is_causal, enable_gqa)
    is_usable = getattr(cuda, f"can_use_{kernel}_attention")
    return bool(is_usable(parameters))


# --- flex_attention -------------------------------------------------------------------------------

# The global name in torch's module under which the redirected function finds its replacement.
_HANDLER = "_shoal_attention"


def redirect_flex_attention(
    handle: Callable[[Callable[..., Any], Any, Any], Any],
) -> Callable[[], None]:
    """Redirect `flex_attention` to `handle(original, args, kwargs)`; return a function to undo it.

    A mode of torch, such as `TorchFunctionMode`, is not called for `flex_attention`. Programs
    import the function by name, so replacing the name in torch's module is not enough. Therefore
    the function object itself gets another code object, which every reference to the function runs.
    """
    # imported here because it takes 0.1 s
    from torch.nn.attention.flex_attention import flex_attention

    function: Any = flex_attention
    code = function.__code__
    defaults = function.__defaults__
    keyword_defaults = function.__kwdefaults__
    original: Any = FunctionType(code, function.__globals__, function.__name__, defaults)
    original.__kwdefaults__ = keyword_defaults

    @disable_dynamo
    def call(args: Any, kwargs: Any) -> Any:
        return handle(original, args, kwargs)

    # Only the code of `redirected` is used. It runs as the code of `flex_attention`, so it reads
    # the global names of torch's module. Therefore `call` is stored there, under the name
    # `_HANDLER`.
    def redirected(*args: Any, **kwargs: Any) -> Any:
        # `_shoal_attention`, the value of `_HANDLER`, is a global name of torch's module.
        return _shoal_attention(args, kwargs)  # type: ignore[name-defined] # noqa: F821 # as above

    function.__globals__[_HANDLER] = call
    function.__defaults__ = None
    function.__kwdefaults__ = None
    function.__code__ = redirected.__code__

    def undo() -> None:
        function.__code__ = code
        function.__defaults__ = defaults
        function.__kwdefaults__ = keyword_defaults
        del function.__globals__[_HANDLER]

    return undo
