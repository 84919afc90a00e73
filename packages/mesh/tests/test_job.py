"""Covers: worker.py: messages between the parent and its ranks."""

from __future__ import annotations

import pickle

from shoal_mesh.local_ranks.failures import Failure
from shoal_mesh.local_ranks.worker import Job


def test_jobs_and_failures_are_values_that_travel() -> None:
    job = Job(
        b"function",
        b"payload",
        {"x": 1},
        ["/path"],
        ["script"],
        "/",
        (1234, "prefix"),
        "gloo",
        (71, 72),
        last=False,
    )
    failure = Failure("ValueError", "no", "Traceback", skip=False, error=None)
    assert pickle.loads(pickle.dumps(job)) == job
    assert pickle.loads(pickle.dumps(failure)) == failure
