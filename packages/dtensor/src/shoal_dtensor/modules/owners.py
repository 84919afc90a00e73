"""Owners of parameters on data axes, so that styles and data axes can be applied in any order.

An owner is the object that `fully_shard` or `replicate` makes for the parameters of its modules.
Data axes are the mesh axes along which ranks have different batches. A style shards a module's
parameters over other axes, as `parallelize_module` does by a plan.

A style shards whole parameters. Therefore an owner first replaces its shards by the whole
parameters, and afterwards shards the parameters that the style has made. Attributes and hooks that
users attach to parameters are carried over to the replacing parameters. A carried-over hook looks
the original hook up, so that the user can still remove it by its handle. The step of an optimizer
that holds a replaced parameter raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal_mesh import DeviceMesh

from .._torch.tensors import TensorNote, accumulation_hooks, gradient_hooks
from ..errors import LayoutError, StyleError, UnsupportedModuleError
from ..tensor.dtensor import DTensor

Item = TypeVar("Item")


@lru_cache(maxsize=1024)
def with_methods(base: Any, cls: Any) -> Any:
    """Return a class with the methods of `base` and `cls`, under the name of `cls`.

    `cls` is the class of the user, and checkpoints and libraries look for its name.
    """

    def reduce(module: nn.Module, protocol: Any) -> Any:
        """Reduce the class to its parts, from which it is found when a copy is made or loaded."""
        # By default: a function that makes an instance, its arguments (combined,), the attributes.
        make, args, *state = super(combined, module).__reduce_ex__(protocol)
        if args != (combined,):
            # The user's class defines how its instances are made.
            return make, args, *state
        return _empty, (base, cls), *state

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__reduce_ex__": reduce,
        # the user's class, also if `cls` is itself the result of this function
        "_shoal_class": getattr(cls, "_shoal_class", cls),
    }
    combined: Any = type(cls.__name__, (base, cls), namespace)
    return combined


def refuse_save_pretrained(module: nn.Module, refused: bool = True) -> None:
    """Replace the `save_pretrained` of a transformers model, because it would write shards.

    The replacing method raises, and names the function that saves a sharded model.

    Args:
        module: a module. Nothing is replaced if its class does not have the method, or if it has a
            `peft_config`, because it then writes adapters only.
        refused: False restores the method of the class.
    """
    attributes = vars(module)
    has_method = hasattr(type(module), "save_pretrained")
    if refused and has_method and not hasattr(module, "peft_config"):
        attributes.setdefault("save_pretrained", partial(_save_pretrained, module))
        return
    # peft may have added adapters after the method was replaced.
    is_replaced = getattr(attributes.get("save_pretrained"), "func", None) is _save_pretrained
    if is_replaced:
        del attributes["save_pretrained"]


def _save_pretrained(model: Any, *args: Any, **options: Any) -> None:
    """Save the plain tensors of a state dict, if one is passed; otherwise refuse to save shards."""
    if save_whole_tensors(model, *args, **options):
        return
    raise StyleError(
        "save_pretrained: this model's parameters are shards, which transformers cannot save. "
        "Call hf.save_sharded(model, directory) on all ranks: from_pretrained of transformers "
        "reads these files. Or pass full tensors as state_dict=, on one rank"
    )


def save_whole_tensors(
    model: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    **options: Any,
) -> bool:
    """Save a state dict of plain tensors by a transformers model's own method, on this rank alone.

    Returns:
        False if there is no such state dict; then nothing has been saved.
    """
    values = state_dict.values() if state_dict is not None else ()
    has_dtensors = any(isinstance(value, DTensor) for value in values)
    has_whole_tensors = state_dict is not None and not has_dtensors
    if has_whole_tensors:
        # The method of the class, because `refuse_save_pretrained` has replaced the instance's.
        save = type(model).save_pretrained
        save(model, save_directory, is_main_process, state_dict, **options)
    return has_whole_tensors


def _empty(base: type, cls: type) -> Any:
    """Return an instance without state of an extended class; copies and pickles refer to this."""
    combined = with_methods(base, cls)
    return combined.__new__(combined)


class Owner(Protocol):
    """A layer that averages gradients of parameters over data axes, and may shard them there."""

    # the name of the function that made the owner: fully_shard or replicate
    made_by: str

    # parameters of its modules that it does not manage
    @property
    def ignored(self) -> Sequence[nn.Parameter]: ...
    # the data axes
    @property
    def data_mesh(self) -> DeviceMesh: ...
    # whether this rank keeps gradients for a later reduction
    @property
    def keeps_gradients(self) -> bool: ...
    # Return the parameters that its modules hold now.
    def held_parameters(self) -> Iterable[Tensor]: ...
    # Replace shards over the data axes by whole parameters in its modules.
    def restore_parameters(self) -> None: ...
    # Manage, and perhaps shard, the parameters that its modules hold now.
    def take_parameters(self) -> None: ...


_OWNERS: WeakSet[Owner] = WeakSet()


def register_owner(owner: Owner) -> None:
    """Register an owner; it is asked for its parameters as long as it lives."""
    _OWNERS.add(owner)


def live_owners() -> list[Owner]:
    """Return all living owners, in any order."""
    return list(_OWNERS)


def owners_of(module: nn.Module) -> list[Owner]:
    """Return the owners of a module's parameters, in the order of `module.parameters()`.

    This order is the same on all ranks. The order of `_OWNERS` is not.
    """
    owner_of = {}
    for owner in _OWNERS:
        for param in (*owner.held_parameters(), *owner.ignored):
            owner_of[id(param)] = owner
    owned = [id(param) for param in module.parameters() if id(param) in owner_of]
    return list(dict.fromkeys(owner_of[key] for key in owned))


def releasable_owners(module: nn.Module, mesh: DeviceMesh | None = None) -> list[Owner]:
    """Return the owners of a module's parameters, or raise if one cannot restore whole parameters.

    It raises before anything is changed. `mesh` has the axes of the style that the module gets; it
    is None when a style is undone.
    """
    owners = owners_of(module)
    params = {id(param) for param in module.parameters()}
    for owner in owners:
        if mesh is not None:
            if {*owner.data_mesh.axis_names} & {*mesh.axis_names}:
                raise LayoutError(
                    f"a style on axes {mesh.axis_names}: {owner.made_by} has placed parameters on "
                    f"the data axes {owner.data_mesh.axis_names} already; use an axis for data or "
                    "for styles, not for both"
                )
            # Raises if the parameters cannot be on both meshes.
            DeviceMesh.concatenate([owner.data_mesh, mesh])
        if params.intersection(map(id, owner.ignored)):
            raise LayoutError(
                f"a style on a module with parameters that were passed to {owner.made_by} as "
                "ignored_params: the style would replace them; apply the style before "
                f"{owner.made_by}"
            )
        if any(map(has_own_hooks, owner.held_parameters())):
            raise LayoutError(
                "a style on a module with parameters that got gradient hooks after "
                f"{owner.made_by}: the style would replace the parameters; register hooks after "
                "all styles are applied"
            )
        if owner.keeps_gradients:
            raise StyleError(
                f"a style on a module with gradients that {owner.made_by} keeps for a later "
                "reduction: reduce them first, or drop them with zero_grad()"
            )
    return owners


@contextmanager
def whole_parameters(owners: Sequence[Owner]) -> Iterator[None]:
    """Restore whole parameters on data axes to modules inside the block."""
    with ExitStack() as restorers:
        for owner in owners:
            owner.restore_parameters()
            restorers.callback(owner.take_parameters)
        yield


def batched_by_owner(
    items: Iterable[tuple[Item, Sequence[Owner]]], *, as_one_group: bool = False
) -> list[tuple[list[Item], list[Owner]]]:
    """Group items that need the same owners, so that few parameters are whole at the same time.

    With `as_one_group`, all items form one group, and stay in their order.
    """
    # Example: the modules "up 0" of unit 0, "up 1" of unit 1 and "down 0" of unit 0 give the groups
    # [([up 0, down 0], [unit 0]), ([up 1], [unit 1])].
    turns: dict[object, tuple[list[Item], dict[Owner, None]]] = {}
    for number, (item, needed) in enumerate(items):
        key: object
        if as_one_group:
            key = "all"
        elif needed:
            key = tuple(needed)
        else:
            # An item without owners forms a group of its own.
            key = number
        group, owners = turns.setdefault(key, ([], {}))
        group.append(item)
        owners.update(dict.fromkeys(needed))
    return [(group, [*owners]) for group, owners in turns.values()]


# --- state that is carried over to a replacing parameter ------------------------------------------

_STATE = "_shoal_state"
_REPLACED = "_shoal_replaced"
# torch's mark of a parameter, the last value of a partial norm, and the base of a copied view
_ATTRIBUTES_OF_DTENSORS = frozenset({"_is_param", "_reduced", "_source"})
_Hooks = Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class _CarriedState(TensorNote):
    """State of a parameter that replaced another."""

    # names of the attributes that the replacing parameter had before the original's were set
    own_attributes: frozenset[str]
    # the original's gradient hooks: (on the gradient, after accumulation)
    hooks: tuple[_Hooks, _Hooks]


@dataclass(frozen=True, slots=True)
class _Carried:
    """A hook of another parameter, as long as its handle has not removed it."""

    hooks: _Hooks
    key: int

    def __call__(self, tensor: Any) -> Any:
        hook = self.hooks.get(self.key)
        return None if hook is None else hook(tensor)


def _attributes_of_user(param: Any) -> dict[str, Any]:
    """Return the attributes that a user has set on a parameter, or on the one that it replaced."""
    state: _CarriedState | None = getattr(param, _STATE, None)
    internal = {_STATE, _REPLACED}
    if state:
        internal |= state.own_attributes
    elif isinstance(param, DTensor):
        # This DTensor replaced a parameter without attributes and hooks.
        internal |= _ATTRIBUTES_OF_DTENSORS
        internal |= {name for name in vars(param) if name.startswith("_shoal_")}
    return {name: value for name, value in vars(param).items() if name not in internal}


def _hooks(param: Any) -> tuple[_Hooks, _Hooks]:
    """Return the gradient hooks of a parameter's user: (on the gradient, after accumulation)."""
    state: _CarriedState | None = getattr(param, _STATE, None)
    if state:
        return state.hooks
    return gradient_hooks(param) or {}, accumulation_hooks(param) or {}


def has_hooks(param: Tensor) -> bool:
    """Tell whether a plain parameter has gradient hooks of its user."""
    return any(_hooks(param))


def has_own_hooks(param: Any) -> bool:
    """Tell whether a DTensor parameter has its user's gradient hooks besides carried-over hooks."""
    if not isinstance(param, DTensor):
        return False
    tensor_hooks = gradient_hooks(param) or {}
    post_hooks = accumulation_hooks(param) or {}
    own_count = 0
    for hook in tensor_hooks.values():
        # A DTensor wraps each registered hook in a `CheckedHook`, whose `hook` is the hook itself.
        registered = getattr(hook, "hook", hook)
        if not isinstance(registered, _Carried):
            own_count += 1
    are_carried = all(isinstance(hook, _Carried) for hook in post_hooks.values())
    # Every DTensor that gets gradients has one `ParameterGradientHook`, which is not its user's.
    return own_count > 1 or not are_carried


def note_replaced(param: Tensor) -> None:
    """Make the steps of optimizers that hold a replaced parameter raise."""
    setattr(param, _REPLACED, True)
    _install_check_of_optimizers()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise an error if an optimizer holds a parameter that was replaced."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            # torch.compile guards a compiled step on the presence of this attribute, so a step that
            # was compiled before the attribute was set is compiled again.
            if hasattr(param, _REPLACED):
                raise StyleError(
                    f"{type(optimizer).__name__}.step: it holds a parameter of shape "
                    f"{tuple(param.shape)} that a style, data parallelism or distribute_module "
                    "has replaced, so the update would not reach any module. Construct the "
                    "optimizer after parallelize_module, fully_shard and "
                    "replicate(shard_optimizer=True)"
                )


@cache
def _install_check_of_optimizers() -> None:
    """Register the check for all optimizers; `cache` makes later calls do nothing."""
    register_optimizer_step_pre_hook(_before_step)


# A parameter that replaces another gets its gradient by `carry_gradient`. Attributes and hooks are
# carried over by `move_attachments` if the old parameter leaves all modules for good, so that its
# optimizers must raise. If the caller decides later which parameters to note, it calls
# `carry_attached`.


def carry_gradient(old: Any, new: Any, grad: Tensor | None) -> None:
    """Copy the gradient, and the dtype chosen for gradients, to a replacing parameter."""
    if old.grad_dtype is not old.dtype:
        new.grad_dtype = old.grad_dtype
    if grad is not None:
        new.grad = grad


def move_attachments(old: Any, new: Any) -> None:
    """Carry the attributes and gradient hooks of a plain parameter over to its DTensor, or back.

    Steps of optimizers that hold the old parameter raise afterwards.
    """
    note_replaced(old)
    carry_attached(old, new)


def carry_attached(old: Any, new: Any) -> None:
    """Copy attributes and gradient hooks to a replacing tensor; do not note the old one."""
    attributes = _attributes_of_user(old)
    hooks: _Hooks = {}
    post_hooks: _Hooks = {}
    # The hooks that a DTensor got itself are called with DTensors, so `new` cannot have them.
    if getattr(old, _STATE, None) or not isinstance(old, DTensor):
        hooks, post_hooks = _hooks(old)
    if not attributes and not hooks and not post_hooks:
        return
    setattr(new, _STATE, _CarriedState(frozenset(vars(new)), (hooks, post_hooks)))
    for name, value in attributes.items():
        setattr(new, name, value)
    trained = new.requires_grad
    # Hooks can only be registered on tensors that get gradients.
    new.requires_grad_(trained or bool(hooks or post_hooks))
    for key in hooks:
        new.register_hook(_Carried(hooks, key))
    for key in post_hooks:
        new.register_post_accumulate_grad_hook(_Carried(post_hooks, key))
    new.requires_grad_(trained)


def holds_tensors(param: Tensor | None) -> bool:
    """Tell whether a parameter is made of tensors, like quantized weights, and is not a DTensor."""
    return hasattr(param, "__tensor_flatten__") and not hasattr(param, "device_mesh")


def check_plain_tensors(name: str, params: Iterable[Tensor]) -> None:
    """Raise UnsupportedModuleError if a parameter is made of other tensors.

    Collectives send plain tensors only. `name` is the function in the message.
    """
    for param in params:
        if holds_tensors(param):
            raise UnsupportedModuleError(
                f"{name}: a parameter of shape {tuple(param.shape)} is a {type(param).__name__}, "
                "a tensor subclass that holds other tensors (such as a quantized weight), which "
                "only its library can shard. Pass it in ignored_params: it stays whole on every "
                "rank, and is not trained"
            )
