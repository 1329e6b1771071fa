"""How jobs are, read from objects as the API's documentation shows them."""

from __future__ import annotations

from typing import Any

import pytest

from watchstep_launch.backend import JobStatus
from watchstep_launch.backends.kubernetes.states import END_REQUESTED, status_of

Object = dict[str, Any]


def job(condition: str = "", reason: str = "", *, asked: str = "", suspend: bool = False) -> Object:
    conditions = [{"type": condition, "status": "True", "reason": reason, "message": ""}] if condition else []
    annotations = {"annotations": {END_REQUESTED: asked}} if asked else {}
    return {
        "metadata": {"name": "j", **annotations},
        "spec": {"suspend": suspend},
        "status": {"conditions": conditions},
    }


def pod(
    phase: str,
    code: int | None = None,
    *,
    number: int = 0,
    index: int = 0,
    waiting: tuple[str, str] | None = None,
    unscheduled: str = "",
    deleted: bool = False,
) -> Object:
    state: Object = {}
    if code is not None:
        state = {"terminated": {"exitCode": code, "reason": "Error"}}
    elif waiting is not None:
        state = {"waiting": {"reason": waiting[0], "message": waiting[1]}}
    elif phase == "Running":
        state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    metadata: Object = {
        "name": f"j-{index}-{number}",
        "creationTimestamp": f"2026-01-01T00:00:{number:02d}Z",
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        "ownerReferences": [{"uid": "job"}],
    }
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unscheduled}
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "main"}], "nodeName": "" if unscheduled else "node-1"},
        "status": {
            "phase": phase,
            "conditions": [said] if unscheduled else [],
            "containerStatuses": [{"name": "main", "state": state}] if state else [],
        },
    }


@pytest.mark.parametrize(
    ("held", "pods", "status"),
    [
        (job(), [], JobStatus("queued", detail="no pod exists yet")),
        (job(suspend=True), [], JobStatus("queued", detail="suspended: waiting for admission")),
        (job(), [pod("Pending")], JobStatus("queued", detail="Pending on node-1")),
        (
            job(),
            [pod("Pending", waiting=("ImagePullBackOff", 'Back-off pulling image "x"'))],
            JobStatus("queued", detail='ImagePullBackOff: Back-off pulling image "x"'),
        ),
        (
            job(),
            [pod("Pending", waiting=("ContainerCreating", ""))],
            JobStatus("queued", detail="Pending on node-1"),
        ),
        (
            job(),
            [pod("Pending", unscheduled="0/3 nodes are available")],
            JobStatus("queued", detail="Unschedulable: 0/3 nodes are available"),
        ),
        (job(), [pod("Running")], JobStatus("running", detail="Running on node-1")),
        (job(), [pod("Running", deleted=True)], JobStatus("running", detail="is being ended")),
        (job(), [pod("Failed", 1)], JobStatus("running", detail="waiting for a restart")),
        (
            job(),
            [pod("Failed", 1), pod("Pending", number=1)],
            JobStatus("running", detail="Pending on node-1"),
        ),
        (
            job("Complete", "CompletionsReached"),
            [pod("Succeeded", 0)],
            JobStatus("ended", 0, "CompletionsReached"),
        ),
        (job("Complete", "Done", asked="stop"), [pod("Succeeded", 0)], JobStatus("ended", 0, "Done")),
        (
            job("Failed", "BackoffLimitExceeded"),
            [pod("Failed", 3)],
            JobStatus("ended", 3, "BackoffLimitExceeded"),
        ),
        (
            job("Failed", "PodFailurePolicy"),
            [pod("Failed", 1), pod("Failed", 87, number=1)],
            JobStatus("ended", 87, "PodFailurePolicy"),
        ),
        (
            job("Failed", "BackoffLimitExceeded"),
            [pod("Failed", 137)],
            JobStatus("ended", -9, "BackoffLimitExceeded"),
        ),
        (job("Failed", "Evicted"), [], JobStatus("ended", None, "Evicted")),
        (
            job("Failed", "DeadlineExceeded", asked="kill"),
            [],
            JobStatus("cancelled", None, "DeadlineExceeded"),
        ),
        (
            job("Failed", "BackoffLimitExceeded", asked="stop"),
            [pod("Failed", 5)],
            JobStatus("cancelled", 5, "BackoffLimitExceeded"),
        ),
        (
            job("Failed", "FailedJobs"),
            [pod("Running"), pod("Failed", 1, index=1)],
            JobStatus("running", None, "Running on node-1"),
        ),
        (
            job("Failed", "FailedJobs"),
            [pod("Succeeded", 0), pod("Failed", 4, index=1)],
            JobStatus("ended", 4, "FailedJobs"),
        ),
        (
            job("Suspended", "Suspended", suspend=True, asked="stop"),
            [],
            JobStatus("cancelled", None, "Suspended"),
        ),
        (
            job("Suspended", "Suspended", suspend=True),
            [],
            JobStatus("queued", None, "suspended: waiting for admission"),
        ),
        (
            job("Suspended", "Suspended", suspend=True, asked="stop"),
            [pod("Running", deleted=True)],
            JobStatus("running", None, "is being ended"),
        ),
    ],
)
def test_how_a_job_is(held: Object, pods: list[Object], status: JobStatus) -> None:
    assert status_of(held, pods) == status


def test_long_words_of_the_cluster_are_cut() -> None:
    told = status_of(job(), [pod("Pending", unscheduled="nodes\n" * 400)]).detail
    assert told.startswith("Unschedulable: nodes nodes")
    assert len(told) <= 300
