"""Checks of parameters: all data-parallel ranks have the same parameters, and they have values.

The ranks compare digests of the names, shapes and dtypes of their parameters. If these differ, the
ranks exchange the descriptions, and raise the same error. Parameters on the meta device, or without
initialized values, are errors too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import check_materialized
from shoal_mesh import Comm, LockstepError, all_gather
from shoal_mesh.internal import is_traced

from .data_axes import DataAxes
from .leaf_checks import check_steps_in_backward, has_no_values
from .sharded_parameters import ShardedParameter, Site

_ABSENT = "no parameter"


def check_same_parameters(
    function: str, parameters: Iterable[tuple[str, Tensor]], axes: DataAxes
) -> None:
    """Raise LockstepError unless all data-parallel ranks have the same parameters.

    The error names the first parameter that differs. The check takes one all-gather of 16 bytes: a
    digest of the descriptions and their length, 8 bytes each. If ranks differ, another all-gather
    sends the descriptions. A parameter that is frozen on one rank
    and trained on another also differs, because only the second rank would reduce its gradient.
    Nothing is checked on one rank. With a fake backend, under a FakeTensorMode or while the call is
    traced nothing is checked either, because no values arrive from other ranks.

    Args:
        function: the name of the function that is called, for the error.
        parameters: the parameters of this rank, with their names.
        axes: the data axes.
    """
    comm = axes.comm
    # `is_traced` is true under a FakeTensorMode too.
    if "fake" in comm.backend or comm.size == 1 or is_traced():
        return
    rows = [_description(name, param) for name, param in parameters]
    text = "\n".join(rows).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    device = axes.mesh.device_type
    # int64 is signed
    digest_as_int64 = int.from_bytes(digest, "little", signed=True)
    # One row (1, 2) from each rank: the all-gather joins them along dim 0 to (ranks, 2).
    fingerprint = torch.tensor([[digest_as_int64, len(text)]], device=device)
    gathered = all_gather(fingerprint, comm).tolist()
    if all(row == gathered[0] for row in gathered):
        return
    lengths = [length for _, length in gathered]
    texts = _gather_texts(text, lengths, comm, device=device)
    _raise_first_difference(function, [text.splitlines() for text in texts], comm)


def _description(name: str, param: Tensor) -> str:
    state = "trained" if param.requires_grad else "frozen"
    return f"{name}: {tuple(param.shape)} {param.dtype}, {state}"


def _gather_texts(text: bytes, lengths: Sequence[int], comm: Comm, *, device: str) -> list[str]:
    """Return the texts of all ranks.

    An all-gather sends rows of one length, so each rank pads its text to the longest text.
    """
    # at least one byte, because `torch.frombuffer` refuses an empty buffer
    longest = max(*lengths, 1)
    padded = bytearray(text.ljust(longest, b" "))
    row = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    rows = all_gather(row.unsqueeze(0), comm).cpu()
    pairs = zip(rows, lengths, strict=True)
    return [bytes(row[:length].tolist()).decode() for row, length in pairs]


def _raise_first_difference(
    function: str, descriptions: Sequence[Sequence[str]], comm: Comm
) -> None:
    """Raise LockstepError for the first position at which the parameters of the ranks differ.

    Args:
        function: the name of the function that is called.
        descriptions: for each rank of the communicator, the descriptions of its parameters.
        comm: the communicator.
    """
    # one description from each rank, of the parameters at one position
    for one_per_rank in zip_longest(*descriptions, fillvalue=_ABSENT):
        if len({*one_per_rank}) == 1:
            continue
        ranks_with: dict[str, list[int]] = {}
        for rank, description in zip(comm.ranks, one_per_rank, strict=True):
            ranks_with.setdefault(description, []).append(rank)
        listed = "; ".join(
            f"{description} on ranks {ranks}" for description, ranks in ranks_with.items()
        )
        raise LockstepError(
            f"{function}: all data-parallel ranks must have the same parameters in the same "
            f"order, and agree which are trained. The first parameter that differs: {listed}"
        )


def check_initialized(function: str, names: Sequence[str]) -> None:
    """Raise StyleError for parameters whose memory was allocated, but not initialized.

    Args:
        function: the name of the function that is called, for the error.
        names: the parameters that the caller has found without values (`has_no_values`); empty if
            it found none.
    """
    if names:
        raise StyleError(
            f"{function}: parameters {list(names)} have memory but no values, as module.to_empty() "
            "leaves them. Initialize the parameters (with module.reset_parameters(), or by "
            "load_state_dict) before the first forward"
        )


def check_values(
    function: str,
    modules: Sequence[nn.Module],
    parameters: Sequence[ShardedParameter],
    *,
    were_on_meta: bool,
) -> None:
    """Raise StyleError if sharded parameters of modules have no values, or step in the backward.

    Nothing is checked on a mesh of the device type meta, where no parameter ever has values.

    Args:
        function: the name of the function that is called, for the error.
        modules: the modules that contain the parameters. In the error, the name of a parameter is
            its path from one of these modules.
        parameters: the parameters.
        were_on_meta: whether parameters were on the meta device when they were sharded.
    """
    for parameter in parameters:
        check_steps_in_backward(function, parameter.leaf)
    # `gathered` is the layout of a parameter in the modules' computation. All parameters are on one
    # mesh.
    if not parameters or parameters[0].gathered.mesh.device_type == "meta":
        return
    on_meta = [p for p in parameters if p.leaf.device.type == "meta"]
    if on_meta:
        # This raises for these parameters, and so does `check_initialized` below.
        sites = [site for parameter in on_meta for site in parameter.sites]
        check_materialized(function, [*_names_of(sites, modules)])
    # Only parameters that were on the meta device can have memory without values (`to_empty()`).
    # The check reads all elements, so it is left out for others.
    if were_on_meta:
        unset = [site for p in parameters if has_no_values(p.leaf) for site in p.sites]
        check_initialized(function, [*_names_of(unset, modules)])


def _names_of(sites: Sequence[Site], modules: Sequence[nn.Module]) -> Iterator[str]:
    """Return the names of parameters in modules."""
    for root in modules:
        for path, module in root.named_modules():
            yield from (f"{path}.{key}".lstrip(".") for owner, key in sites if owner is module)
