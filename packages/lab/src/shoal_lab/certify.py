"""`certify`: run a program on ranks and on one device, and compare all that training computes.

May import: certification, errors, ranks, report, shrinking.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from shoal_mesh.internal import FUNCTION, require

from .certification import Certification, ProgramFailure
from .errors import CertifyError, CertifyTypeError
from .ranks import RankJob
from .report import CertificationReport
from .shrinking import shrink_failure

Program = Callable[..., Any] | str | PathLike[str]


def certify(  # noqa: PLR0913  # keywords for what runs may differ in
    program: Program,
    reference: Callable[..., Any] | None = None,
    *,
    meshes: Sequence[Mapping[str, int]],
    arguments: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    dtype: str = "float64",
    tolerance: float | None = None,
    shrink: bool = True,
    device: str | None = None,
) -> CertificationReport:
    """Compare a training program on meshes with the same training on one device.

    The program runs unchanged on ranks of this machine. Hooks record the parameters at the first
    forward of each step and at the end of the program, and the gradients and the optimizer's state
    at the optimizer's step. Every logical tensor must be equal to the tensor of one device. If it
    is not, the report names the combination that explains the values of all ranks.

    On one device, data loaders return the concatenated batches of the ranks. A program without data
    loaders must take its rows from a global batch whose size does not depend on the number of
    ranks.

    Args:
        program: a function, or the path of a script, which runs as under torchrun. The function is
            called on every rank with the mesh, a dict of axis sizes by name. Ranks are in row-major
            order, and there is a default process group. The function may return a dict of values
            by name: each rank must return the whole value of one device, or a DTensor.
        reference: a function that trains on one device. It gets the mesh if it has an argument
            without a default that is not among the sizes. By default it is the program itself, on
            one rank, with a mesh of sizes 1.
        meshes: the meshes to compare on, each a dict of axis sizes by name. For a script on a mesh
            {"ranks": n}, the names of axes are taken from its device meshes or process groups.
        arguments: the arguments of the script. `{tp}` in an argument stands for the size of the
            axis tp, which is 1 on one device.
        sizes: keyword arguments of program and reference, such as the number of layers; they are
            halved to find a smaller failing program.
        dtype: the default dtype of both runs, or "" to leave torch's.
        tolerance: the allowed difference relative to the norm of a value. By default it is 1e-9 for
            float64, and follows from the coarsest dtype of the values otherwise.
        shrink: whether to look for a smaller mesh and smaller sizes that fail, after a failure.
        device: "cpu" to run programs for an accelerator on the CPU; by default the devices that
            the program asks for.

    Returns:
        The report, one result for each mesh.

    Raises:
        CertifyTypeError: an argument of a wrong type.
        CertifyError: no mesh, a size that is not positive, a reference for a script, or a reference
            that fails where the ranks succeed.

    Example:
        >>> def train(mesh):
        ...     model = torch.nn.Linear(4, 2)
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     torch.optim.SGD(model.parameters(), lr=0.1).step()
        >>> print(certify(train, meshes=[{"dp": 2}]))
        mesh dp=2: 6 values compared within 1e-09: equal to one device
    """
    job = _make_job(program, tuple(arguments), sizes or {})
    job = replace(job, dtype=dtype, device=device)
    certification = Certification(job, _make_reference(job, reference, sizes or {}), tolerance)
    _check_meshes(meshes)
    report = CertificationReport()
    for mesh in meshes:
        try:
            report.results.append(certification.run(mesh))
        except ProgramFailure as failure:
            raise failure.error from None
    if shrink and not report.passed:
        shrink_failure(certification, report)
    return report


def _make_job(program: object, arguments: tuple[str, ...], sizes: Mapping[str, int]) -> RankJob:
    """Make the job of a script with its arguments, or of a function with its sizes."""
    if isinstance(program, str | PathLike):
        path = Path(fspath(program))
        if not path.is_file():
            raise CertifyError(f"certify: the script {path} does not exist")
        return RankJob(script=str(path), arguments=arguments)
    taken = "certify: program is a function or the path of a script"
    require(program, FUNCTION, taken, CertifyTypeError)
    assert callable(program), "required"
    return RankJob(function=program, sizes=tuple(sizes.items()))


def _make_reference(job: RankJob, reference: object, sizes: Mapping[str, int]) -> RankJob:
    """Make the job that runs on one device."""
    if reference is None:
        return job
    require(reference, FUNCTION, "certify: reference is a function", CertifyTypeError)
    assert callable(reference), "required"
    if job.function is None:
        raise CertifyError(
            "certify: a script is compared with itself on one rank, so reference= cannot be "
            "passed with a script. Certify a function, or leave reference out"
        )
    parameters = inspect.signature(reference).parameters
    required = [name for name, one in parameters.items() if one.default is one.empty]
    takes_mesh = not set(required) <= set(sizes)
    return replace(job, function=reference, takes_mesh=takes_mesh)


def _check_meshes(meshes: object) -> None:
    """Raise unless there is a list of meshes with positive sizes."""
    if not isinstance(meshes, Sequence) or not all(isinstance(mesh, Mapping) for mesh in meshes):
        raise CertifyTypeError(
            "certify: expected meshes to be a list of dicts of axis sizes, such as "
            f"[{{'dp': 2, 'tp': 2}}], got {meshes!r}"
        )
    if not meshes:
        raise CertifyError("certify: meshes is empty; give at least one mesh")
    for mesh in meshes:
        are_positive = all(isinstance(size, int) and size > 0 for size in mesh.values())
        if not mesh or not are_positive:
            raise CertifyError(f"certify: the sizes of a mesh must be positive, got {dict(mesh)}")
