"""AWS Batch, on a stand-in before moto whose containers are processes of this machine: no AWS was met."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from pydantic import ValidationError

from tests.launch.backends.aws.aws_bench import BATCH, IMAGE, QUEUE, ROLE, hurried_batch
from tests.launch.backends.aws.aws_stand_in import ACCOUNT, REGION, LostError, RefusalError, StandIn
from tests.launch.backends.aws.batch_stand_in import BatchStandIn
from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import TELLING, WILLING, Bench
from tests.services.jobs import eventually
from watchstep.errors import ConfigError
from watchstep.format.control import ControlDocument
from watchstep.format.layout import CONTROL_DOCUMENT, run_prefix
from watchstep.stopping import EXIT_STOPPED, EXIT_TOMBSTONE
from watchstep.store.store import Store
from watchstep.wrapper.environment import LAUNCHED
from watchstep_launch.backend import (
    BackendDownError,
    BackendError,
    CredentialsExpiredError,
    JobHandle,
    JobNotFoundError,
    Launch,
    SubmissionRejectedError,
    open_backend,
)
from watchstep_launch.backends.aws.batch import AwsBatch, definition_of, status_of, streams_of, submission

NEVER = [{"onExitCode": str(code), "action": "EXIT"} for code in (EXIT_STOPPED, EXIT_TOMBSTONE)]
SECRET = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:watchstep/token-a1b2c3"


@pytest.fixture
def bench(batch: BatchStandIn, tmp_path: Path) -> Iterator[Bench]:
    held = Bench(hurried_batch(batch), tmp_path)
    yield held
    held.close()


def changed(bench: Bench, batch: BatchStandIn, **changes: Any) -> Bench:
    return Bench(hurried_batch(batch, **changes), bench.folder)


def launched(bench: Bench, *command: str, **changes: Any) -> JobHandle:
    launch = Launch(command, {}, bench.folder, name=f"ws-{uuid.uuid4().hex[:8]}")
    job = bench.backend.submit(replace(launch, **changes))
    bench._jobs.append(job)
    return job


def submitted(stand_in: StandIn, operation: str = "SubmitJob") -> list[dict[str, Any]]:
    return [call.body for call in stand_in.calls if call.operation == operation]


@pytest.mark.ci
def test_a_job_is_asked_for_as_its_settings_say(bench: Bench, batch: BatchStandIn, stand_in: StandIn) -> None:
    batch.holds = True
    held = changed(
        bench, batch, gpus=1, shared_memory_mib=1024, job_role=ROLE, execution_role=ROLE, attempts=3, timeout_seconds=600,
        evaluate_on_exit=({"onStatusReason": "Host EC2*", "action": "RETRY"},), share_identifier="vision",
        tags={"team": "vision"}, secrets={"WATCHSTEP_TOKEN": SECRET}, extra={"propagateTags": True},
        definition_extra={"containerProperties": {"user": "trainer"}},
    )  # fmt: skip
    for _ in range(2):
        job = launched(
            held, "python", "-c", "pass", environment={"EMPTY": ""}, secrets={"WATCHSTEP_TOKEN": "t"}
        )
    (first, second), (registered,) = submitted(stand_in), submitted(stand_in, "RegisterJobDefinition")
    needs = [
        {"type": "VCPU", "value": "1"},
        {"type": "MEMORY", "value": "2048"},
        {"type": "GPU", "value": "1"},
    ]
    assert registered["containerProperties"] == {
        "image": IMAGE, "jobRoleArn": ROLE, "executionRoleArn": ROLE, "command": ["true"], "resourceRequirements": needs,
        "secrets": [{"name": "WATCHSTEP_TOKEN", "valueFrom": SECRET}], "linuxParameters": {"sharedMemorySize": 1024},
        "user": "trainer",
    }  # fmt: skip
    assert first["jobDefinition"] == second["jobDefinition"]  # equal definitions are registered once
    overrides = second.pop("containerOverrides")
    assert overrides["command"][3:] == ["watchstep", "python", "-c", "pass"]
    assert (overrides["environment"], overrides["resourceRequirements"]) == (
        [{"name": "EMPTY", "value": ""}],
        needs,
    )
    assert second == {
        "jobName": second["jobName"], "jobQueue": QUEUE, "jobDefinition": second["jobDefinition"],
        "retryStrategy": {
            "attempts": 3, "evaluateOnExit": [*NEVER, {"onStatusReason": "Host EC2*", "action": "RETRY"}],
        },
        "timeout": {"attemptDurationSeconds": 600}, "shareIdentifier": "vision", "propagateTags": True,
        "tags": {"team": "vision", "watchstep": "1"},
    }  # fmt: skip
    assert held.backend.stop(job).state == "cancelled"  # it waited


@pytest.mark.ci
def test_a_definition_of_ones_own(bench: Bench, stand_in: StandIn) -> None:
    client = boto3.client("batch", region_name=REGION)
    container = {"image": IMAGE, "vcpus": 1, "memory": 512, "command": ["true"]}
    client.register_job_definition(jobDefinitionName="mine", type="container", containerProperties=container)
    own = AwsBatch(job_queue=QUEUE, job_definition="mine")
    job = own.submit(Launch((sys.executable, "-c", "pass"), {}, bench.folder, name="ws-own"))
    assert Bench(own, bench.folder).end_of(job).exit_code == 0
    (asked,) = submitted(stand_in)
    assert (asked["jobDefinition"], set(asked["containerOverrides"])) == ("mine", {"command"})
    assert "retryStrategy" not in asked
    for name in ("mine", "mine:1"):
        lacking = AwsBatch(job_queue=QUEUE, job_definition=name, secrets={"WATCHSTEP_TOKEN": SECRET})
        with pytest.raises(SubmissionRejectedError, match="does not provide secret WATCHSTEP_TOKEN"):
            lacking.submit(Launch(("true",), {}, bench.folder, secrets={"WATCHSTEP_TOKEN": "t"}))
    client.register_job_definition(
        jobDefinitionName="mine", type="container",
        containerProperties={**container, "secrets": [{"name": "WATCHSTEP_TOKEN", "valueFrom": SECRET}]},
    )  # fmt: skip
    has = AwsBatch(job_queue=QUEUE, job_definition="mine", secrets={"WATCHSTEP_TOKEN": SECRET})
    has.submit(Launch(("true",), {}, bench.folder, secrets={"WATCHSTEP_TOKEN": "in the clear"}))
    assert "in the clear" not in str(submitted(stand_in))


def test_several_nodes(tmp_path: Path) -> None:
    backend = AwsBatch(**{**BATCH, "nodes": 4, "platform": "EC2"})
    registered = definition_of(backend)
    (every,) = registered["nodeProperties"]["nodeRangeProperties"]
    assert (registered["type"], registered["nodeProperties"]["mainNode"], every["targetNodes"]) == (
        "multinode",
        0,
        "0:",
    )
    assert every["container"]["image"] == IMAGE
    asked = submission(backend, Launch(("train",), {"A": "1"}, tmp_path), "n", "d")
    (overrides,) = asked["nodeOverrides"]["nodePropertyOverrides"]
    assert asked["nodeOverrides"]["numNodes"] == 4
    assert "containerOverrides" not in asked
    assert "PET_NODE_RANK" in overrides["containerOverrides"]["command"][2]


@pytest.mark.ci
def test_nodes_find_each_other(bench: Bench, batch: BatchStandIn, stand_in: StandIn) -> None:
    """Moto knows no multi-node definitions: a plain one takes its place."""
    definition = hurried_batch(batch)._definition()
    held = changed(bench, batch, image=None, vcpus=None, memory_mib=None, job_definition=definition, nodes=2)
    names = ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "WATCHSTEP_RESTARTS"]
    program = (
        f"import os, sys; os.write(1, ' '.join(os.environ[name] for name in {names}).encode())\n"
        "sys.exit(3 * int(os.environ['PET_NODE_RANK']))"
    )
    job = launched(held, "python", "-c", program)
    status = held.end_of(job)
    assert (status.state, status.exit_code) == ("ended", 3)
    assert held.output_of(job) == b"2 0 127.0.0.1 0\n[node 1] 2 1 127.0.0.1 0\n"


@pytest.mark.ci
def test_what_was_stopped_stays_stopped_when_batch_starts_it_again(bench: Bench, batch: BatchStandIn) -> None:
    held = changed(bench, batch, attempts=5)
    (bench.folder / "store").mkdir()
    store = Store.open(str(bench.folder / "store"))
    program = (
        "import os, pathlib, signal, sys, time; name = os.environ['WATCHSTEP_ATTEMPT']; pathlib.Path(name).touch()\n"
        "while not pathlib.Path(name + '.fail').exists(): time.sleep(0.01)\nsys.exit(1)"
    )
    run = ("run", "--store", store.url, "--run", "r1", "--", sys.executable, "-c", program)
    job = launched(
        held, "python", "-c", "from watchstep.command import main; main()", *run, environment={LAUNCHED: "a1"}
    )
    eventually((bench.folder / "a1").exists, bench.seconds)
    (bench.folder / "a1.fail").touch()
    eventually((bench.folder / "a1-r1").exists, bench.seconds)  # nothing has stopped it
    stopped = ControlDocument(version=1, tombstone="a rule said so")
    store.child(run_prefix("default", "r1")).put(CONTROL_DOCUMENT, stopped.encode())
    (bench.folder / "a1-r1.fail").touch()
    status = held.end_of(job)
    assert (status.state, status.exit_code) == ("ended", EXIT_TOMBSTONE)
    assert b"does not start again" in held.output_of(job)


def test_many_jobs_are_listed_page_by_page(bench: Bench, batch: BatchStandIn) -> None:
    batch.holds = True
    mine = [launched(bench, "true") for _ in range(5)]
    definition = hurried_batch(batch)._definition()
    client = boto3.client("batch", region_name=REGION)
    client.submit_job(jobName="theirs", jobQueue=QUEUE, jobDefinition=definition)
    assert bench.backend.jobs() == mine
    assert AwsBatch().jobs() == []


def test_a_job_that_others_submitted_is_attached_to_and_stopped(bench: Bench, batch: BatchStandIn) -> None:
    ready = bench.folder / "theirs.ready"
    command = [sys.executable, "-c", TELLING.replace("{ready!r}", repr(str(ready)))]
    theirs = boto3.client("batch", region_name=REGION).submit_job(
        jobName="theirs", jobQueue=QUEUE, jobDefinition=hurried_batch(batch)._definition(),
        containerOverrides={"command": command},
    )  # fmt: skip
    registered: Any = open_backend("aws_batch", {"region": REGION})  # as a service has it: no queue, no image
    job = registered.reattach(theirs["jobArn"])
    assert (job, job.id) == (registered.reattach(theirs["jobId"]), theirs["jobId"])
    eventually(ready.exists, bench.seconds)
    registered.stop(job)
    status = bench.end_of(job)
    assert (status.state, status.exit_code) == ("cancelled", 5)


def test_jobs_that_are_none(bench: Bench) -> None:
    arn = f"arn:aws:batch:{REGION}:{ACCOUNT}:job/nobody"
    for name in ("nobody", arn, "a b", "x" * 65, arn.replace(ACCOUNT, "1")):
        with pytest.raises(JobNotFoundError):
            bench.backend.reattach(name)
    for identity in ({"arn": arn}, {"arn": arn, "created": "x"}, {"arn": f"{arn}2", "created": 1}):
        with pytest.raises(ConfigError):
            bench.backend.settled(JobHandle("aws_batch", "nobody", identity))
    gone = JobHandle("aws_batch", "nobody", {"arn": arn, "created": 1})
    assert bench.backend.status(gone).state == "vanished"
    assert bench.backend.stop(gone).state == "vanished"
    assert bench.backend.logs(gone).data == b""
    others = replace(gone, identity={"arn": arn.replace(ACCOUNT, "210987654321"), "created": 1})
    with pytest.raises(CredentialsExpiredError, match="210987654321"):  # not seen from here is not gone
        bench.backend.status(others)


def test_a_stop_that_is_refused(bench: Bench, stand_in: StandIn) -> None:
    job = bench.launch(WILLING)
    stand_in.faults["TerminateJob"] = [RefusalError("ClientException", "not now")]
    with pytest.raises(BackendError, match="not now"):
        bench.backend.stop(job)
    bench.backend.stop(job)
    assert bench.end_of(job).state == "cancelled"


@pytest.mark.ci
def test_a_submission_without_an_answer(bench: Bench, stand_in: StandIn) -> None:
    stand_in.faults["SubmitJob"] = [LostError()]
    taken = launched(bench, "true")
    assert bench.end_of(taken).exit_code == 0
    stand_in.faults["SubmitJob"] = [RefusalError("TooManyRequestsException", "Rate exceeded", 429)]
    with pytest.raises(BackendDownError, match="Rate exceeded"):
        launched(bench, "true", name="ws-never-taken")
    assert len(submitted(stand_in)) == 2  # never asked twice
    assert bench.backend.jobs() == []


@pytest.mark.ci
def test_what_batch_would_not_take_is_named(bench: Bench, batch: BatchStandIn, stand_in: StandIn) -> None:
    plain = Launch(("true",), {}, bench.folder, name="ws-refused")
    for launch, said in [
        (replace(plain, environment={"AWS_BATCH_X": "1"}), "AWS_BATCH_X"),
        (replace(plain, environment={"NO-NAME": "1"}), "NO-NAME"),
        (replace(plain, environment={"ZERO": "\0"}), "zero byte"),
        (replace(plain, command=("train", "Ref::lr")), "a job parameter"),
        (replace(plain, command=("train", "\0")), "zero byte"),
        (replace(plain, environment={"LONG": "x" * 31_000}), "30720"),
    ]:
        with pytest.raises(SubmissionRejectedError, match=said):
            bench.backend.submit(launch)
    with pytest.raises(SubmissionRejectedError, match="is not set"):
        AwsBatch().submit(plain)
    with pytest.raises(SubmissionRejectedError, match="does not exist"):
        changed(bench, batch, job_queue="nobodys").backend.submit(plain)
    with pytest.raises(SubmissionRejectedError, match="ParamValidation"):
        changed(bench, batch, extra={"noSuchThing": 1}).backend.submit(plain)
    assert bench.backend.jobs() == []
    for settings in (
        {"job_definition": "d", "image": IMAGE}, {"image": IMAGE}, {"evaluate_on_exit": [{"action": "EXIT"}]},
    ):  # fmt: skip
        with pytest.raises(ValidationError):
            AwsBatch.model_validate(settings)


@pytest.mark.parametrize(
    ("found", "state", "code"),
    [
        ({"status": "SUBMITTED"}, "queued", None), ({"status": "RUNNABLE"}, "queued", None),
        ({"status": "STARTING"}, "running", None), ({"status": "NEW"}, "unknown", None),
        ({"status": "SUCCEEDED", "container": {"exitCode": 0}}, "ended", 0),
        ({"status": "FAILED", "container": {"exitCode": 137}}, "ended", -9),
        ({"status": "FAILED", "container": {}, "attempts": [{"container": {"exitCode": 86}}]}, "ended", 86),
        ({"status": "FAILED", "statusReason": "Host EC2 (i-1) terminated."}, "ended", None),
        ({"status": "FAILED", "isTerminated": True, "container": {"exitCode": 143}}, "cancelled", -15),
        ({"status": "FAILED", "isCancelled": True}, "cancelled", None),
        ({"status": "SUCCEEDED", "isTerminated": True, "container": {"exitCode": 0}}, "ended", 0),
    ],
)  # fmt: skip
def test_states(found: Mapping[str, Any], state: str, code: int | None) -> None:
    status = status_of(found)
    assert (status.state, status.exit_code) == (state, code)


def test_streams_of_attempts_are_read_in_their_order() -> None:
    attempts = [{"container": {"logStreamName": name}} for name in ("a", "b")]
    assert list(streams_of({"attempts": attempts, "container": {"logStreamName": "b"}})) == ["a", "b"]
    assert list(streams_of({"container": None})) == []
