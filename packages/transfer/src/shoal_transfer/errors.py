"""Errors of the transfer layer; errors shared by siblings are in `shoal_dtensor`."""

from __future__ import annotations

from shoal_dtensor.errors import PlanError, StyleError


class ManifestError(StyleError, ValueError):
    """A model that cannot be described, or a manifest that is not valid."""


class MappingError(PlanError):
    """A mapping that does not fit its tensors, or does not define each target element once."""


class ProofError(PlanError):
    """A transfer plan that does not do what the mapping says; the message names tensor and box."""


class TransferError(StyleError, RuntimeError):
    """A transfer failed or was refused while it ran; the message says what the target holds."""


class LoaderComputesError(MappingError):
    """A loader that computes values instead of moving them; the message names the parameter."""
