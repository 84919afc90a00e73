"""`record`: run a module on DTensors of an abstract mesh, and record its local operators and moves.

A dispatch mode sees every operator of the forward. Operators on DTensors are dispatched with an
observer, so that the mode records the local operators that they call and the redistributions before
them. Tensors have no memory.

May import: trace, writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Spec, implicit_replication
from shoal_dtensor.errors import ArgumentValueError, NoRuleError
from shoal_dtensor.internal import (
    DataDependentError,
    FakeTensorMode,
    Plan,
    TorchDispatchMode,
    dispatch_observed,
    plan_between,
    pytree,
    shares_memory,
    signature_of,
)

from .trace import Movement, Trace, TracedOperation, TracedValue, values_in
from .writes import View, written_form

_UNRECORDED = frozenset({"prim::device"})
# the layout of the output of a module, by the path of the module
Layouts = Mapping[str, Callable[[DTensor], Spec]]


class EmissionError(ArgumentValueError):
    """A forward that cannot be written as a program of local operators and typed collectives."""


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers; an operator with a dropout of 0 does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in signature_of(func).arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(values.get("dropout_p", 0.0))


class _LocalOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """The mode that records the operators that a local function calls."""

    def __init__(self, recorder: ForwardRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._recorder.record(func, args, kwargs or {}, is_inside=True)


class ForwardRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """The mode that records the local operators and the moves of operators on DTensors.

    Attributes:
        trace: the record.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.trace = Trace()
        # id of a tensor -> its value
        self._values: dict[int, TracedValue] = {}
        # keeps the tensors alive, so that their ids stay unique
        self._kept: list[Tensor] = []
        # id of a view -> the view
        self._views: dict[int, View] = {}
        # ids of views whose memory was written through another tensor
        self._outdated: set[int] = set()
        # the paths of the modules whose forward runs, innermost last
        self._path: list[str] = []
        # the number of the present operator of the forward, and this operator
        self._group = 0
        self._operator: Any = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        distributed = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        self._group += 1
        self._operator = func
        if not distributed:
            return self.record(func, args, kwargs, is_inside=False)
        if _draws(func, args, kwargs):
            raise EmissionError(
                f"emit: {func} draws random numbers, which DTensors draw as one process does, and "
                "local tensors do not; set the module to eval(), or its dropout to 0"
            )
        result = dispatch_observed(DTensor, func, args, kwargs, observer=self)
        if func is torch.ops.aten.detach.default or not torch.is_grad_enabled():
            return result
        if any(map(self._takes_gradient, distributed)):
            self._note_gradients(result)
        return result

    def _takes_gradient(self, tensor: DTensor) -> bool:
        """Return whether a gradient reaches a DTensor."""
        return self.value_of(tensor._local_tensor).takes_gradient

    def _note_gradients(self, result: Any) -> None:
        """Record that gradients reach the results of an operator."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, DTensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self.value_of(leaf._local_tensor).takes_gradient = True

    # --- the observer of operators on DTensors ----------------------------------------------------

    def move(self, local: Tensor, plan: Plan) -> Tensor:
        """Record a redistribution, and return a tensor of the shape of its result.

        A plan without steps, such as a gather along an axis of one rank, keeps the tensor.
        """
        takes_gradient = self.value_of(local).takes_gradient
        if not plan.steps and (torch.is_grad_enabled() or not takes_gradient):
            return local
        moved = torch.empty(plan.dst.local_shape, dtype=plan.dst.dtype, device=local.device)
        source = self.value_of(local)
        output = self._new_value(moved)
        output.spec = plan.dst
        output.takes_gradient = source.takes_gradient and torch.is_grad_enabled()
        self.trace.entries.append(Movement(plan, source, output, self.path))
        return moved

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a local function, and record its operators."""
        with _LocalOperators(self):
            return function(*args, **kwargs)

    def run_composite(self, function: Callable[[], Any]) -> Any:
        """Run a function that calls operators on DTensors, and record these."""
        with self:
            return function()

    def place(self, local: Tensor, spec: Spec) -> None:
        """Record the layout of a result."""
        if not spec.even:
            raise EmissionError(
                f"emit: {spec!r} has shards of different sizes, for which a program of one text "
                "has no sizes; use sizes that the mesh divides"
            )
        value = self.value_of(local)
        value.spec = spec
        value.is_inside = False

    # --- the record -------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The path of the module whose forward runs."""
        return self._path[-1] if self._path else ""

    def record(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_inside: bool
    ) -> Any:
        """Run an operator on local tensors, and record it."""
        name = signature_of(func).name
        if name in _UNRECORDED:
            return func(*args, **kwargs)
        if name == "aten::lift_fresh" and id(args[0]) not in self._values:
            raise EmissionError(
                f"emit: {self.path or 'the root module'} makes a tensor of numbers, by "
                "torch.tensor or by an assignment x[...] = number, and the program has no name for "
                "it; register it as a buffer, or write x[...].fill_(number)"
            )
        if signature_of(func).is_mutable and not signature_of(self._operator).is_mutable:
            raise EmissionError(
                f"emit: {self._operator} in {self.path or 'the root module'} runs on shards as "
                f"several operators that differ between ranks, one of them {func}; replicate its "
                "operands in the plan"
            )
        if signature_of(func).is_mutable:
            return self._write(func, args, kwargs, is_inside)
        return self._record_call(func, args, kwargs, is_inside)

    def _record_call(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_inside: bool
    ) -> Any:
        """Run an operator that writes to no argument, and record it."""
        name = signature_of(func).name
        operands = self._with_values((args, {**kwargs}))
        result = func(*args, **kwargs)
        self._note_views(func, args, kwargs, result)
        # such operators do not change the value, so they are not recorded
        has_no_effect = name == "aten::alias" or (
            name == "aten::detach" and not self.value_of(args[0]).takes_gradient
        )
        if has_no_effect:
            self._values[id(result)] = self.value_of(args[0])
            self._kept.append(result)
            return result
        self._add_operation(func, operands, result, is_inside)
        return result

    def _note_views(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note the results that are views of the first argument."""
        source = args[0] if args else None
        if not isinstance(source, Tensor):
            return
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and shares_memory(leaf, source):
                self._views[id(leaf)] = View(func, source, args[1:], kwargs)

    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_inside: bool
    ) -> Tensor:
        """Record a write in place as operators that return new tensors, and return the target."""
        target: Tensor = args[0]
        views = [*self._views_from(target)]
        parts = [(tensor, view) for tensor, view in views if not self._is_alias(tensor, view)]
        base = views[-1][1].source if views else target
        self._check_write(func, base, [view for _, view in parts])
        before = self.value_of(base)
        values = [self.value_of(tensor) for tensor, _ in parts]
        written = self._record_write(func, args, kwargs, is_inside)
        for _, view in parts:
            arguments = (view.source, written, *view.rest)
            written = self._record_call(view.scatter, arguments, view.kwargs, is_inside)
        aliases = [tensor for tensor, view in views if self._is_alias(tensor, view)]
        self._outdate(base)
        self._rebind(base, written, before)
        for tensor, view in reversed(views):
            if any(tensor is alias for alias in aliases):
                self._values[id(tensor)] = self.value_of(view.source)
                self._outdated.discard(id(tensor))
                continue
            renewed = self._record_call(
                view.operator, (view.source, *view.rest), view.kwargs, is_inside
            )
            self._rebind(tensor, renewed, values.pop())
        return target

    def _views_from(self, tensor: Tensor) -> Iterator[tuple[Tensor, View]]:
        """Yield a view, the view that it was taken from, and so on."""
        while id(tensor) in self._views:
            view = self._views[id(tensor)]
            yield tensor, view
            tensor = view.source

    def _is_alias(self, tensor: Tensor, view: View) -> bool:
        """Tell whether a view is its whole source, so that both are one value."""
        return self._values[id(tensor)] is self._values[id(view.source)]

    def _check_write(self, func: Any, base: Tensor, views: Sequence[View]) -> None:
        """Refuse a write that is seen outside of the forward, or has no form without a write."""
        subject = f"emit: {func} in {self.path or 'the root module'} writes in place to"
        value = self.value_of(base)
        if value.parameter or value.is_input:
            holder = "the weight or buffer" if value.parameter else "the input"
            raise EmissionError(
                f"{subject} {holder} {value.parameter or value.hint}, which the program does not "
                "own; write to a clone of it"
            )
        without = [view.operator for view in views if view.scatter is None]
        if without:
            raise EmissionError(
                f"{subject} a view made by {without[0]}; write to slices or entries of a tensor "
                "only"
            )
        if written_form(func) is None:
            raise EmissionError(f"{subject} a tensor, and no operator returns the result instead")

    def _record_write(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_inside: bool
    ) -> Tensor:
        """Record the operator that returns the tensor that `func` would write."""
        target: Tensor = args[0]
        written: Tensor
        if func is torch.ops.aten.copy_.default:
            written = args[1]
        else:
            written = self._record_call(written_form(func), args, kwargs, is_inside)
        if written.shape != target.shape:
            size = [*target.shape]
            written = self._record_call(
                torch.ops.aten.expand.default, (written, size), {}, is_inside
            )
        if written.dtype != target.dtype:
            dtype = {"dtype": target.dtype}
            written = self._record_call(
                torch.ops.aten._to_copy.default, (written,), dtype, is_inside
            )
        return written

    def _outdate(self, base: Tensor) -> None:
        """Note that all views of a tensor have older values than its memory."""
        for key, view in self._views.items():
            sources = [view.source, *[other.source for _, other in self._views_from(view.source)]]
            if sources[-1] is base:
                self._outdated.add(key)

    def _rebind(self, tensor: Tensor, renewed: Tensor, before: TracedValue) -> None:
        """Give a written tensor the value of another one, in the layout that it has."""
        value = self.value_of(renewed)
        value.spec = before.spec
        value.is_inside = before.is_inside
        if torch.is_grad_enabled() and (tensor.is_floating_point() or tensor.is_complex()):
            operation = self.trace.entries[-1]
            assert isinstance(operation, TracedOperation), "a write ends with an operator"
            takes_gradient = any(operand.takes_gradient for operand in operation.operands)
            value.takes_gradient = value.takes_gradient or takes_gradient
        self._values[id(tensor)] = value
        self._outdated.discard(id(tensor))

    def _add_operation(self, func: Any, operands: Any, result: Any, is_inside: bool) -> None:
        """Add an operation to the trace, and values for its results."""
        outputs = []
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                value = self._new_value(leaf)
                value.is_inside = is_inside
                outputs.append(value)
        takes_gradient = any(value.takes_gradient for value in values_in(operands))
        args, kwargs = operands
        operation = TracedOperation(
            func,
            args,
            kwargs,
            outputs,
            group=self._group,
            path=self.path,
            cuts_gradient=takes_gradient and not torch.is_grad_enabled(),
        )
        self.trace.entries.append(operation)

    def _with_values(self, structure: Any) -> Any:
        """Return a structure with values in place of its tensors."""
        return pytree.tree_map(
            lambda leaf: self.value_of(leaf) if isinstance(leaf, Tensor) else leaf, structure
        )

    def value_of(self, local: Tensor) -> TracedValue:
        """Return the value of a recorded tensor."""
        if id(local) in self._outdated:
            raise EmissionError(
                f"emit: {self.path or 'the root module'} reads a view of a tensor that was written "
                "in place after the view was taken; take the view after the write"
            )
        found = self._values.get(id(local))
        if found is None:
            raise EmissionError(
                f"emit: a tensor of shape {tuple(local.shape)} in {self.path or 'the root module'} "
                "is not a parameter, a buffer or an input, so the program has no name for it; "
                "register it as a buffer"
            )
        return found

    def _new_value(self, local: Tensor) -> TracedValue:
        """Make the value of a new tensor."""
        value = TracedValue(tuple(local.shape), local.dtype)
        self._values[id(local)] = value
        self._kept.append(local)
        return value

    def described_result(self, result: Any) -> Any:
        """Return the structure of a result with values in the place of tensors."""
        if isinstance(result, DTensor):
            return self.value_of(result._local_tensor)
        if isinstance(result, Tensor):
            return self.value_of(result)
        if isinstance(result, Mapping):
            present = {name: item for name, item in result.items() if item is not None}
            return {name: self.described_result(item) for name, item in present.items()}
        if isinstance(result, list | tuple):
            return tuple([self.described_result(item) for item in result])
        if result is None or isinstance(result, bool | int | float | str):
            return result
        raise EmissionError(
            f"emit: the forward returns a {type(result).__name__}; return tensors, and tuples and "
            "dicts of them (for a model of transformers: use_cache=False)"
        )

    def record_input(self, name: str, like: Tensor, spec: Spec) -> Any:
        """Return a DTensor without memory for a parameter or an input, and record its value."""
        if not spec.even:
            raise EmissionError(f"emit: the mesh does not divide {name}, {spec!r}")
        local = torch.empty(spec.local_shape, dtype=like.dtype, device=spec.mesh.device_type)
        value = self._new_value(local)
        value.spec = spec
        value.takes_gradient = like.requires_grad
        return DTensor(local, spec, requires_grad=like.requires_grad)

    def redistribute(self, tensor: DTensor, spec: Spec) -> DTensor:
        """Return a DTensor in another layout, and record the move."""
        moved = self.move(tensor._local_tensor, plan_between(tensor.spec, spec))
        return DTensor(moved, spec, requires_grad=self.value_of(moved).takes_gradient)

    # --- modules ----------------------------------------------------------------------------------

    @contextmanager
    def inside_modules(self, root: nn.Module, layouts: Layouts) -> Iterator[None]:
        """Open a block in which hooks record the running module, and give outputs their layouts."""
        handles = []
        for path, module in root.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(path)))
            handles.append(module.register_forward_hook(self._leave(path, layouts.get(path))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Callable[..., None]:
        """Return the hook before the forward of a module."""

        def enter(module: nn.Module, args: Any) -> None:
            self._path.append(path)

        return enter

    def _leave(
        self, path: str, layout: Callable[[DTensor], Spec] | None
    ) -> Callable[[nn.Module, Any, Any], Any]:
        """Return the hook after the forward of a module, which places its first DTensor."""

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            leaves, structure = pytree.tree_flatten(output)
            distributed = [i for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)]
            if distributed:
                first = distributed[0]
                leaves[first] = self._placed_output(leaves[first], path, layout)
            self._path.pop()
            return pytree.tree_unflatten(leaves, structure)

        return leave

    def _placed_output(
        self, output: DTensor, path: str, layout: Callable[[DTensor], Spec] | None
    ) -> DTensor:
        """Return the output of a module in its layout, named after the module.

        If an inner module has named the output already, that name stays.
        """
        wanted = output.spec if layout is None else layout(output)
        tensor = output if wanted == output.spec else self.redistribute(output, wanted)
        value = self.value_of(tensor._local_tensor)
        parts = [part for part in path.split(".") if not part.isdigit()]
        if parts and not value.hint and not value.parameter:
            value.hint = parts[-1]
        return tensor


def record(
    module: nn.Module,
    inputs: Mapping[str, Any],
    specs: Mapping[str, Spec],
    layouts: Layouts,
) -> Trace:
    """Return the record of one forward.

    Args:
        module: the module; the values of its parameters and buffers are not read.
        inputs: the arguments of the forward by name.
        specs: the layouts of parameters, buffers and inputs that are tensors, by name.
        layouts: the layouts of outputs of modules, by path.

    Raises:
        EmissionError: if the forward reads values, draws random numbers, or writes in place to its
            inputs or buffers.
    """
    recorder = ForwardRecorder()
    trace = recorder.trace
    fake = FakeTensorMode(allow_non_fake_inputs=False)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with fake:
        weights = {name: recorder.record_input(name, t, specs[name]) for name, t in tensors.items()}
        for name, placed in weights.items():
            trace.parameters[name] = recorder.value_of(placed._local_tensor)
            trace.parameters[name].parameter = name
        arguments = {**inputs}
        trace.arguments = tuple(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                arguments[name] = recorder.record_input(name, value, specs[name])
                trace.inputs[name] = recorder.value_of(arguments[name]._local_tensor)
                trace.inputs[name].is_input = True
                trace.inputs[name].hint = name
    try:
        with fake, implicit_replication(), recorder.inside_modules(module, layouts), recorder:
            result = torch.func.functional_call(module, weights, (), arguments)
    except (*DataDependentError, NoRuleError) as error:
        raise EmissionError(
            f"emit: the forward reads values of tensors in {recorder.path or 'the root module'}, "
            f"which a program for all values cannot: {error}"
        ) from error
    trace.results = recorder.described_result(result)
    return trace
