"""Calls of AWS, and the policies that allow them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.conftest import S3
from tests.launch.backends.aws.aws_bench import ROLE, SAGEMAKER
from tests.launch.backends.aws.aws_stand_in import ACCOUNT, REGION, LostError, RefusalError, StandIn
from tests.launch.backends.aws.sagemaker_stand_in import SageMakerStandIn
from tests.services.redis import free_port
from tests.services.stores.iam import Request, allowed
from watchstep.errors import ConfigError
from watchstep_launch.backend import Backend, BackendDownError, CredentialsExpiredError, JobHandle, Launch
from watchstep_launch.backends.aws.calls import Aws, AwsModel
from watchstep_launch.backends.aws.sagemaker import SageMaker

SAGEMAKER_JOB = JobHandle(
    "sagemaker", "j", {"arn": f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/j", "created": 1}
)
DESCRIBE = "DescribeTrainingJob"
DOCS = Path(__file__).parents[4] / "docs" / "launch"
TAG = {"aws:ResourceTag/watchstep": "1"}
ANY = "*"
Call = tuple[str, str, dict[str, Any]]


@pytest.fixture
def look(stand_in: StandIn) -> Callable[[], Any]:
    """A look at a job that is none."""
    SageMakerStandIn(stand_in)
    return lambda: SageMaker(**SAGEMAKER).status(SAGEMAKER_JOB)


@pytest.mark.ci
def test_refusals_are_told_apart(look: Callable[[], Any], stand_in: StandIn) -> None:
    for code, status, expected in [
        ("ThrottlingException", 400, BackendDownError), ("TooManyRequestsException", 429, BackendDownError),
        ("ServerException", 500, BackendDownError), ("InternalFailure", 503, BackendDownError),
        ("ExpiredTokenException", 403, CredentialsExpiredError), ("AccessDeniedException", 400, CredentialsExpiredError),
        ("UnrecognizedClientException", 403, CredentialsExpiredError), ("InvalidSignatureException", 403, CredentialsExpiredError),
        ("SomethingNew", 400, BackendDownError),
    ]:  # fmt: skip
        stand_in.faults[DESCRIBE] = [RefusalError(code, "said so", status)] * 2
        with pytest.raises(expected, match="said so"):
            look()
        stand_in.faults.clear()
    stand_in.faults[DESCRIBE] = [LostError()]
    assert look().state == "vanished"  # asked once more
    stand_in.faults[DESCRIBE] = [LostError(), LostError()]
    with pytest.raises(BackendDownError, match="does not answer"):
        look()


@pytest.mark.ci
def test_credentials_that_come_later_are_found(
    look: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            without.delenv(name)
        without.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        without.setenv("AWS_CONFIG_FILE", "/nonexistent")
        with pytest.raises(CredentialsExpiredError, match="credentials"):
            look()
    assert look().state == "vanished"


def test_a_role_is_taken(stand_in: StandIn, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    SageMakerStandIn(stand_in)
    role = SageMaker(assume_role=f"arn:aws:iam::{ACCOUNT}:role/jobs", external_id="ext-1")
    assert role.status(SAGEMAKER_JOB).state == "vanished"
    elsewhere = SageMaker(assume_role="arn:aws:iam::210987654321:role/jobs")
    with pytest.raises(CredentialsExpiredError, match="210987654321"):  # the role's account, not the caller's
        elsewhere.status(SAGEMAKER_JOB)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{free_port()}")
    with pytest.raises((BackendDownError, CredentialsExpiredError)):
        SageMaker(assume_role=f"arn:aws:iam::{ACCOUNT}:role/jobs").status(SAGEMAKER_JOB)


def test_a_region_is_the_jobs_own_or_named(
    look: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    assert look().state == "vanished"  # by its ARN
    with pytest.raises(ConfigError, match="no region"):
        SageMaker(**SAGEMAKER).submit(Launch(("true",), {}, tmp_path, name="ws-1"))


@pytest.mark.usefixtures("stand_in")
def test_nobody_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", f"http://127.0.0.1:{free_port()}")
    backend = SageMaker(**SAGEMAKER)
    with pytest.raises(BackendDownError):
        backend.submit(Launch(("true",), {}, tmp_path, name="ws-1"))
    for call in (backend.status, backend.stop, backend.kill):
        with pytest.raises(BackendDownError):
            call(SAGEMAKER_JOB)


def test_what_cannot_be_written() -> None:
    for settings in ({"assume_role": "admin"}, {"region": "evil.example/"}, {"no_such": 1}):
        with pytest.raises(ValidationError):
            AwsModel.model_validate(settings)


def policy(name: str) -> str:
    """A policy of the docs."""
    text = (DOCS / "sagemaker.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"<!-- policy: {name} -->\n```json\n(.*?)```", text, re.DOTALL)
    return str(found)


def arn(service: str, rest: str) -> str:
    return f"arn:aws:{service}:{REGION}:{ACCOUNT}:{rest}"


def passing(role: str, to: str) -> Request:
    return Request("iam:PassRole", role, {"iam:PassedToService": to})


def requests(call: Call) -> list[Request]:
    """What AWS asks the policies for a call, by its Service Authorization Reference."""
    service, operation, asked = call
    if service == "s3":
        return [Request("s3:PutObject", f"arn:aws:s3:::{asked['Bucket']}/{asked['Key']}")]
    if service == "logs":
        stream = asked.get("logStreamName", "")
        action = "".join(part.title() for part in operation.split("_"))
        group = arn("logs", f"log-group:{asked['logGroupName']}:")
        return [Request(f"logs:{action}", f"{group}log-stream:{stream}" if stream else group)]
    action = f"{service}:{''.join(part.title() for part in operation.split('_'))}"
    name = asked.get("TrainingJobName") or asked.get("ResourceArn", "").rpartition("/")[2]
    job = arn("sagemaker", f"training-job/{name}")
    if operation == "create_training_job":
        tags = Request("sagemaker:AddTags", job)
        return [Request(action, job), tags, passing(asked["RoleArn"], "sagemaker.amazonaws.com")]
    return [Request(action, ANY if operation == "list_training_jobs" else job, TAG)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """All that is asked of AWS from now on."""
    held: list[Call] = []
    plain = Aws.call

    def call(self: Aws, service: str, operation: str, **asked: Any) -> Any:
        if service != "sts":  # GetCallerIdentity needs no permission
            sent = {name: value for name, value in asked.items() if name not in ("region", "once")}
            held.append((service, operation, sent))
        return plain(self, service, operation, **asked)

    monkeypatch.setattr(Aws, "call", call)
    return held


def launch(backend: Backend, folder: Path) -> JobHandle:
    """All that a launcher does."""
    (folder / "train.py").write_text("pass")
    job = backend.submit(Launch(("python", "train.py"), {}, folder, name="ws-run-1"))
    assert backend.jobs() == [job]
    assert backend.reattach(job.id) == job
    backend.status(job)
    backend.stop(job)
    backend.logs(job)
    return job


def all_allowed(calls: list[Call], name: str) -> None:
    assert calls
    for call in calls:
        for request in requests(call):
            assert allowed(request, policy(name)), request
    calls.clear()


def test_sagemakers(sagemaker: SageMakerStandIn, calls: list[Call], tmp_path: Path) -> None:
    sagemaker.holds = True
    backend = SageMaker(**{**SAGEMAKER, "code_location": "s3://jobs/code"})
    job = launch(backend, tmp_path)
    calls[:] = [(s, o, {**a, "Bucket": "acme-training"} if s == "s3" else a) for s, o, a in calls]
    assert {operation for _, operation, _ in calls} >= {"put_object", "list_tags", "stop_training_job"}
    all_allowed(calls, "sagemaker launcher")
    stopper = SageMaker()
    stopper.status(job)
    stopper.stop(job)
    stopper.reattach(job.id)
    all_allowed(
        [*calls, ("sagemaker", "stop_training_job", {"TrainingJobName": job.id})], "sagemaker service"
    )
    theirs, mine = arn("sagemaker", "training-job/theirs"), arn("sagemaker", "training-job/ws-1")
    for name, request in [
        ("launcher", Request("sagemaker:StopTrainingJob", theirs)),
        ("launcher", Request("sagemaker:CreateTrainingJob", theirs)),
        ("launcher", Request("sagemaker:DeleteTrainingJob", mine)),
        ("launcher", passing(f"arn:aws:iam::{ACCOUNT}:role/admin", "sagemaker.amazonaws.com")),
        ("launcher", passing(ROLE, "lambda.amazonaws.com")),
        ("launcher", Request("s3:PutObject", "arn:aws:s3:::acme-training/runs/x")),
        ("launcher", Request("s3:GetObject", "arn:aws:s3:::acme-training/code/x")),
        ("launcher", Request("logs:GetLogEvents", arn("logs", "log-group:/aws/batch/job:log-stream:x"))),
        ("service", Request("sagemaker:StopTrainingJob", theirs)),
        ("service", Request("sagemaker:CreateTrainingJob", mine)),
        ("job", Request("s3:ListBucket", "arn:aws:s3:::acme-training", {"s3:prefix": "runs/"})),
        ("job", Request("secretsmanager:GetSecretValue", arn("secretsmanager", "secret:other-a1b2c3"))),
    ]:
        assert not allowed(request, policy(f"sagemaker {name}")), request
    for request in (
        Request("s3:GetObject", "arn:aws:s3:::acme-training/code/ws-1/code/start.py"),
        Request("s3:ListBucket", "arn:aws:s3:::acme-training", {"s3:prefix": "code/ws-1/code/"}),
        Request("secretsmanager:GetSecretValue", arn("secretsmanager", "secret:watchstep/token-a1b2c3")),
        Request("sagemaker:DescribeTrainingJob", mine),
    ):
        assert allowed(request, policy("sagemaker job")), request
