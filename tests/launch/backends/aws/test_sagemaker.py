"""SageMaker, on a stand-in before moto whose containers are processes of this machine: no AWS was met."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from pydantic import ValidationError

from tests.launch.backends.aws.aws_bench import (
    IMAGE,
    ROLE,
    SAGEMAKER,
    hurried_sagemaker,
    in_folder,
    uploaded,
)
from tests.launch.backends.aws.aws_stand_in import ACCOUNT, REGION, LostError, RefusalError, StandIn
from tests.launch.backends.aws.sagemaker_stand_in import SageMakerStandIn
from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract
from tests.launch.backends.backend_contract import TELLING, WILLING, Bench
from tests.services.jobs import eventually
from watchstep.errors import ConfigError
from watchstep.format.control import ControlDocument
from watchstep.format.layout import CONTROL_DOCUMENT, run_prefix
from watchstep.stopping import EXIT_TOMBSTONE
from watchstep.store.store import Store
from watchstep.wrapper.environment import LAUNCHED
from watchstep_launch.backend import (
    BackendDownError,
    BackendError,
    CredentialsExpiredError,
    JobHandle,
    JobNotFoundError,
    JobStatus,
    Launch,
    SubmissionRejectedError,
    open_backend,
)
from watchstep_launch.backends.aws.sagemaker import SageMaker, exit_code, status_of

EFS = {
    "DataSource": {
        "FileSystemDataSource": {
            "FileSystemId": "fs-0123456789a", "FileSystemAccessMode": "ro", "FileSystemType": "EFS", "DirectoryPath": "/x",
        }
    }
}  # fmt: skip
TELLS_FOLDER = "import os, sys\nos.write(1, (' '.join([os.getcwd(), *sorted(os.listdir()), *sys.argv[1:]]) + '\\n').encode())\n"


@pytest.fixture
def bench(sagemaker: SageMakerStandIn, tmp_path: Path) -> Iterator[Bench]:
    held = Bench(hurried_sagemaker(sagemaker), tmp_path, keeps_exit_codes=False)
    yield held
    held.close()


def changed(bench: Bench, sagemaker: SageMakerStandIn, **changes: Any) -> Bench:
    return Bench(hurried_sagemaker(sagemaker, **changes), bench.folder, keeps_exit_codes=False)


def launched(bench: Bench, *command: str, **changes: Any) -> JobHandle:
    launch = Launch(command, {}, bench.folder, name=f"ws-{uuid.uuid4().hex[:8]}")
    job = bench.backend.submit(replace(launch, **changes))
    bench._jobs.append(job)
    return job


def created(stand_in: StandIn) -> dict[str, Any]:
    return next(call.body for call in reversed(stand_in.calls) if call.operation == "CreateTrainingJob")


@pytest.mark.ci
def test_a_job_is_asked_for_as_its_settings_say(
    bench: Bench, sagemaker: SageMakerStandIn, stand_in: StandIn
) -> None:
    sagemaker.holds = True
    held = changed(
        bench, sagemaker, instance_count=2, volume_size=500, max_run=3600, use_spot_instances=True, max_retry_attempts=2,
        keep_alive_period_in_seconds=600, subnets=("subnet-1",), security_group_ids=("sg-1",),
        encrypt_inter_container_traffic=True, hyperparameters={"lr": "1e-3", "note": ""}, input_mode="FastFile",
        inputs={"train": "s3://jobs/data", "more": EFS},
        checkpoint_s3_uri="s3://jobs/checkpoints", tags={"team": "vision"}, output_kms_key="key-1",
        extra={"ProfilerConfig": {"DisableProfiler": True}, "ResourceConfig": {"VolumeKmsKeyId": "key-2"}},
    )  # fmt: skip
    job = launched(held, "python", "-c", "pass", environment={"EMPTY": ""}, secrets={"WATCHSTEP_TOKEN": "t"})
    asked = created(stand_in)
    code = asked["InputDataConfig"].pop()
    assert code["DataSource"]["S3DataSource"]["S3Uri"] == f"s3://jobs/out/{job.id}/code/"
    assert code["InputMode"] == "File"
    s3 = {"S3DataType": "S3Prefix", "S3DataDistributionType": "FullyReplicated", "S3Uri": "s3://jobs/data"}
    assert asked == {
        "TrainingJobName": job.id, "RoleArn": ROLE, "HyperParameters": {"lr": "1e-3", "note": ""},
        "AlgorithmSpecification": {
            "TrainingImage": IMAGE, "TrainingInputMode": "FastFile",
            "ContainerEntrypoint": ["python"], "ContainerArguments": ["/opt/ml/input/data/watchstep/start.py"],
        },
        "InputDataConfig": [
            {"ChannelName": "train", "DataSource": {"S3DataSource": s3}},
            {"ChannelName": "more", **EFS},
        ],
        "OutputDataConfig": {"S3OutputPath": "s3://jobs/out", "KmsKeyId": "key-1"},
        "ResourceConfig": {
            "InstanceType": "ml.m5.large", "InstanceCount": 2, "VolumeSizeInGB": 500, "KeepAlivePeriodInSeconds": 600,
            "VolumeKmsKeyId": "key-2",
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 3600},
        "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        "CheckpointConfig": {"S3Uri": "s3://jobs/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
        "RetryStrategy": {"MaximumRetryAttempts": 2},
        "EnableManagedSpotTraining": True, "EnableInterContainerTrafficEncryption": True,
        "ProfilerConfig": {"DisableProfiler": True},
        "Environment": {"EMPTY": "", "WATCHSTEP_TOKEN": "t"},
        "Tags": [{"Key": "team", "Value": "vision"}, {"Key": "watchstep", "Value": "1"}],
    }  # fmt: skip
    assert held.backend.stop(job).state == "cancelled"


def test_a_short_command_of_the_image_goes_without_s3(
    bench: Bench, sagemaker: SageMakerStandIn, stand_in: StandIn
) -> None:
    held = changed(bench, sagemaker, entrypoint=("env", "OWN=1"))
    job = launched(held, "python", "-c", "import os; os.write(1, os.environ['OWN'].encode())")
    assert held.end_of(job).exit_code == 0
    assert held.output_of(job) == b"1\n"
    how = created(stand_in)["AlgorithmSpecification"]
    assert how["ContainerEntrypoint"] == ["env", "OWN=1"]
    assert how["ContainerArguments"][:2] == ["python", "-c"]
    assert uploaded("out/") == {}


def test_the_program_that_is_named_goes_along(bench: Bench) -> None:
    in_folder(bench.folder, "tells.py", TELLS_FOLDER)
    in_folder(bench.folder, "data.bin", "not this one")
    job = launched(bench, "python", "tells.py", "--x", "/etc/hostname", "../up.py")
    assert bench.end_of(job).exit_code == 0
    (place, *rest) = bench.output_of(job).decode().split()
    assert place.endswith("/code")
    assert rest == ["tells.py", "--x", "/etc/hostname", "../up.py"]


def test_the_folder_goes_along(bench: Bench, sagemaker: SageMakerStandIn, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    for part in (".git", "package", "__pycache__"):
        (folder / part).mkdir(parents=True)
        in_folder(folder / part, "file.py", "x = 1")
    in_folder(folder, "main.py", TELLS_FOLDER)
    (folder / "inside.py").symlink_to(folder / "main.py")
    (folder / "outside").symlink_to("/etc/passwd")
    held = changed(bench, sagemaker, source="folder", code_location="s3://jobs/code/")
    job = launched(held, "python", "main.py", folder=folder)
    assert held.end_of(job).exit_code == 0
    assert held.output_of(job).decode().split()[1:] == ["inside.py", "main.py", "package"]
    objects = uploaded(f"code/{job.id}/code/")
    with tarfile.open(fileobj=io.BytesIO(objects[f"code/{job.id}/code/source.tar.gz"])) as packed:
        assert packed.getnames() == ["inside.py", "main.py", "package/file.py"]
    again = launched(held, "python", "main.py", folder=folder)
    place = f"code/{again.id}/code/source.tar.gz"
    assert uploaded(place)[place] == objects[f"code/{job.id}/code/source.tar.gz"]


def test_what_sagemaker_would_not_take_is_named(
    bench: Bench, sagemaker: SageMakerStandIn, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Launch(("true",), {}, bench.folder, name="ws-refused")
    for launch, said in [
        (replace(plain, environment={f"X{n}": "" for n in range(101)}), "101 variables"),
        (replace(plain, environment={"LONG": "x" * 513}), "LONG has 513"),
        (replace(plain, environment={"NO-NAME": "x"}), "NO-NAME"),
        (replace(plain, environment={"ZERO": "\0"}), "zero byte"),
    ]:
        with pytest.raises(SubmissionRejectedError, match=said):
            bench.backend.submit(launch)
    with pytest.raises(SubmissionRejectedError) as refused:
        bench.backend.submit(replace(plain, secrets={"WATCHSTEP_TOKEN": "x" * 513}))
    assert "Secrets Manager" in refused.value.hint
    with pytest.raises(SubmissionRejectedError, match="role is not set"):
        SageMaker().submit(plain)
    with pytest.raises(SubmissionRejectedError, match="S3 refused the upload"):
        changed(bench, sagemaker, code_location="s3://nobodys", max_retry_attempts=1).backend.submit(plain)
    monkeypatch.setattr("watchstep_launch.backends.aws.sagemaker_request.MAX_BYTES", 3)
    in_folder(bench.folder, "big.py", "1234")
    with pytest.raises(SubmissionRejectedError, match=r"at big\.py"):
        bench.backend.submit(replace(plain, command=("python", "big.py")))
    for extra in ({"NoSuchThing": 1}, {"ResourceConfig": {"InstanceCount": "two"}}):
        with pytest.raises(SubmissionRejectedError, match="ParamValidation"):
            changed(bench, sagemaker, extra=extra).backend.submit(plain)
    with pytest.raises(
        SubmissionRejectedError, match="InstanceType"
    ):  # by the service's model, which botocore does not hold it to
        changed(bench, sagemaker, instance_type="m5.large").backend.submit(plain)
    assert bench.backend.jobs() == []
    with pytest.raises(ValidationError):
        SageMaker(**{**SAGEMAKER, "role": "training"})


@pytest.mark.ci
def test_secrets_are_fetched_in_the_container(
    bench: Bench, sagemaker: SageMakerStandIn, stand_in: StandIn
) -> None:
    manager, ssm = (boto3.client(name, region_name=REGION) for name in ("secretsmanager", "ssm"))
    arn = manager.create_secret(Name="watchstep/token", SecretString="of the manager")["ARN"]
    ssm.put_parameter(Name="/ml/other", Value="of the store", Type="SecureString")
    places = {"WATCHSTEP_TOKEN": arn, "OTHER": f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/ml/other"}
    held = changed(bench, sagemaker, secrets=places)
    program = "import os; os.write(1, (os.environ['WATCHSTEP_TOKEN'] + '; ' + os.environ['OTHER']).encode())"
    job = launched(held, "python", "-c", program, secrets={"WATCHSTEP_TOKEN": "in the clear"})
    assert held.end_of(job).exit_code == 0
    assert held.output_of(job) == b"of the manager; of the store\n"
    assert "in the clear" not in json.dumps([call.body for call in stand_in.calls])
    assert all(b"in the clear" not in data for data in uploaded("").values())
    missing = changed(bench, sagemaker, secrets={"WATCHSTEP_TOKEN": f"{arn}-nobody"})
    assert missing.end_of(launched(missing, "true")).exit_code == 125


def test_several_instances_find_each_other(bench: Bench, sagemaker: SageMakerStandIn) -> None:
    held = changed(bench, sagemaker, instance_count=2)
    names = ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"]
    program = (
        f"import os, sys; os.write(1, ' '.join(os.environ[name] for name in {names}).encode())\n"
        "sys.exit(3 * int(os.environ['PET_NODE_RANK']))"
    )
    job = launched(held, "python", "-c", program)
    status = held.end_of(job)
    assert (status.state, status.exit_code) == ("ended", 3)
    assert held.output_of(job) == b"2 0 algo-1\n[algo-2] 2 1 algo-1\n"


@pytest.mark.ci
def test_what_was_stopped_stays_stopped_when_sagemaker_starts_it_again(
    bench: Bench, sagemaker: SageMakerStandIn
) -> None:
    held = changed(bench, sagemaker, max_retry_attempts=1)
    (bench.folder / "store").mkdir()
    store = Store.open(str(bench.folder / "store"))
    program = (
        "import os, pathlib, signal; pathlib.Path(os.environ['WATCHSTEP_ATTEMPT']).touch(); signal.pause()"
    )
    run = ("run", "--store", store.url, "--run", "r1", "--", sys.executable, "-c", program)
    command = ("python", "-c", "from watchstep.command import main; main()", *run)
    job = launched(held, *command, environment={LAUNCHED: "a1"})
    eventually((bench.folder / "a1").exists, bench.seconds)
    sagemaker.begin_again(job.id)
    eventually((bench.folder / "a1-r1").exists, bench.seconds)  # nothing has stopped it
    stopped = ControlDocument(version=1, tombstone="a rule said so")
    store.child(run_prefix("default", "r1")).put(CONTROL_DOCUMENT, stopped.encode())
    sagemaker.begin_again(job.id)
    status = held.end_of(job)
    assert (status.state, status.exit_code) == ("ended", EXIT_TOMBSTONE)


def test_a_job_that_waits_is_stopped(bench: Bench, sagemaker: SageMakerStandIn) -> None:
    sagemaker.holds = True
    job = launched(bench, "true")
    assert bench.backend.status(job) == JobStatus("queued", None, "Starting")
    assert bench.backend.logs(job).data == b""
    assert bench.backend.stop(job).state == "cancelled"


def test_many_jobs_are_listed_page_by_page(bench: Bench, sagemaker: SageMakerStandIn) -> None:
    sagemaker.holds = True
    mine = [launched(bench, "true") for _ in range(5)]
    theirs = {**created_anyhow("theirs"), "Tags": [{"Key": "team", "Value": "x"}]}
    boto3.client("sagemaker", region_name=REGION).create_training_job(**theirs)
    assert bench.backend.jobs() == mine


def created_anyhow(name: str) -> dict[str, Any]:
    return {
        "TrainingJobName": name, "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": IMAGE, "TrainingInputMode": "File", "ContainerEntrypoint": ["python"],
        },
        "OutputDataConfig": {"S3OutputPath": "s3://jobs/out"},
        "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    }  # fmt: skip


def test_a_job_that_others_created_is_attached_to_and_stopped(bench: Bench) -> None:
    ready = bench.folder / "theirs.ready"
    in_folder(bench.folder, "theirs.py", TELLING.replace("{ready!r}", repr(str(ready))))
    asked = created_anyhow("Theirs-1")
    asked["AlgorithmSpecification"]["ContainerArguments"] = [str(bench.folder / "theirs.py")]
    arn = boto3.client("sagemaker", region_name=REGION).create_training_job(**asked)["TrainingJobArn"]
    registered: Any = open_backend("sagemaker", {"region": REGION})  # as a service has it: no image, no role
    job = registered.reattach(arn)
    assert (job, job.id) == (registered.reattach("Theirs-1"), "Theirs-1")
    eventually(ready.exists, bench.seconds)
    registered.stop(job)
    assert bench.end_of(job).state == "cancelled"
    assert b"asked to end\n" in bench.output_of(job)


def test_jobs_that_are_none(bench: Bench) -> None:
    arn = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/nobody"
    for name in ("nobody", arn, "-x", "x" * 64, f"{arn}/x", arn.replace(ACCOUNT, "1")):
        with pytest.raises(JobNotFoundError):
            bench.backend.reattach(name)
    for identity in ({"arn": arn}, {"arn": arn, "created": "x"}, {"arn": f"{arn}2", "created": 1}):
        with pytest.raises(ConfigError):
            bench.backend.settled(JobHandle("sagemaker", "nobody", identity))
    gone = JobHandle("sagemaker", "nobody", {"arn": arn, "created": 1})
    assert bench.backend.status(gone).state == "vanished"
    assert bench.backend.stop(gone).state == "vanished"
    others = replace(gone, identity={"arn": arn.replace(ACCOUNT, "210987654321"), "created": 1})
    with pytest.raises(CredentialsExpiredError, match="210987654321"):  # not seen from here is not gone
        bench.backend.status(others)


def test_a_stop_that_is_refused(bench: Bench, stand_in: StandIn) -> None:
    job = bench.launch(WILLING)
    stand_in.faults["StopTrainingJob"] = [RefusalError("ValidationException", "not in this state")]
    with pytest.raises(BackendError, match="not in this state"):
        bench.backend.stop(job)
    assert bench.backend.stop(job) is not None


@pytest.mark.ci
def test_a_submission_without_an_answer(bench: Bench, stand_in: StandIn) -> None:
    stand_in.faults["CreateTrainingJob"] = [LostError()]
    taken = launched(bench, "true")
    assert bench.end_of(taken).exit_code == 0
    stand_in.faults["CreateTrainingJob"] = [RefusalError("ThrottlingException", "Rate exceeded")]
    with pytest.raises(BackendDownError, match="Rate exceeded"):
        launched(bench, "true", name="ws-never-taken")
    assert (
        len([call for call in stand_in.calls if call.operation == "CreateTrainingJob"]) == 2
    )  # never asked twice
    with pytest.raises(JobNotFoundError):
        bench.backend.reattach("ws-never-taken")
    for code in ("ResourceInUse", "ResourceLimitExceeded"):
        stand_in.faults["CreateTrainingJob"] = [RefusalError(code, "no")]
        with pytest.raises(SubmissionRejectedError, match=code):
            launched(bench, "true")


def test_output_goes_on_behind_a_token_that_is_too_old(bench: Bench) -> None:
    job = launched(bench, "python", "-c", "print('once')")
    bench.end_of(job)
    part = bench.backend.logs(job)
    assert part.data == b"once\n"
    held = {stream: ["no token", written, 0] for stream, (_, written, _) in json.loads(part.cursor).items()}
    assert bench.backend.logs(job, json.dumps(held)).data == b""
    assert bench.backend.logs(job, "nonsense").data == b"once\n"
    assert bench.backend.logs(job, part.cursor) == replace(part, data=b"")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("AlgorithmError: , exit code: 1", 1),
        ("AlgorithmError: , exit code: 137", -9),
        ("AlgorithmError: , exit code: 86", 86),
        (
            'AlgorithmError: ExecuteUserScriptError: ExitCode 3 ErrorMessage "see exit code 4 there" Command "x"',
            3,
        ),
        ('AlgorithmError: ExecuteUserScriptError: ExitCode 2 ErrorMessage "exit code 4", exit code: 2', 2),
        ("ClientError: Data download failed", None),
        ("", None),
    ],
)
def test_exit_codes_in_reasons(reason: str, code: int | None) -> None:
    assert exit_code(reason) == code


@pytest.mark.parametrize(
    ("status", "second", "passed", "state"),
    [
        ("InProgress", "Starting", [], "queued"), ("InProgress", "Pending", [], "queued"),
        ("InProgress", "LaunchingMLInstances", ["Training", "Interrupted"], "running"),
        ("InProgress", "Downloading", [], "running"), ("InProgress", "Uploading", [], "running"),
        ("Stopping", "Stopping", [], "running"), ("Stopped", "Stopped", [], "cancelled"),
        ("Stopped", "MaxRuntimeExceeded", [], "ended"), ("Completed", "Completed", [], "ended"),
        ("Failed", "Failed", [], "ended"), ("Deleting", "Deleting", [], "vanished"), ("New", "New", [], "unknown"),
    ],
)  # fmt: skip
def test_states(status: str, second: str, passed: list[str], state: str) -> None:
    transitions = [{"Status": one} for one in passed]
    found: Mapping[str, Any] = {
        "TrainingJobStatus": status, "SecondaryStatus": second, "SecondaryStatusTransitions": transitions,
    }  # fmt: skip
    assert status_of(found).state == state
    assert status_of(found).exit_code == (0 if status == "Completed" else None)
