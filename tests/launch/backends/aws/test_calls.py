"""How AWS refuses, and what is made of it; whose credentials are used. On a stand-in before moto: no AWS was met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from tests.conftest import S3
from tests.launch.backends.aws.aws_bench import BATCH, SAGEMAKER
from tests.launch.backends.aws.aws_stand_in import ACCOUNT, REGION, LostError, RefusalError, StandIn
from tests.launch.backends.aws.batch_stand_in import BatchStandIn
from tests.launch.backends.aws.sagemaker_stand_in import SageMakerStandIn
from tests.services.redis import free_port
from watchstep.errors import ConfigError
from watchstep_launch.backend import BackendDownError, CredentialsExpiredError, JobHandle, Launch
from watchstep_launch.backends.aws.batch import AwsBatch
from watchstep_launch.backends.aws.calls import AwsModel
from watchstep_launch.backends.aws.sagemaker import SageMaker

SAGEMAKER_JOB = JobHandle(
    "sagemaker", "j", {"arn": f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/j", "created": 1}
)
BATCH_JOB = JobHandle("aws_batch", "j", {"arn": f"arn:aws:batch:{REGION}:{ACCOUNT}:job/j", "created": 1})
DESCRIBE = {"sagemaker": "DescribeTrainingJob", "batch": "DescribeJobs"}


def asked(service: str) -> Callable[[], Any]:
    """A look at a job that is none."""
    backend: Any = SageMaker(**SAGEMAKER) if service == "sagemaker" else AwsBatch(**BATCH)
    job = SAGEMAKER_JOB if service == "sagemaker" else BATCH_JOB
    return lambda: backend.status(job)


@pytest.fixture(params=["sagemaker", "batch"])
def service(request: pytest.FixtureRequest, stand_in: StandIn) -> str:
    makes: Any = {"sagemaker": SageMakerStandIn, "batch": BatchStandIn}[request.param]
    makes(stand_in)
    return str(request.param)


def test_refusals_are_told_apart(service: str, stand_in: StandIn) -> None:
    look = asked(service)
    for code, status, expected in [
        ("ThrottlingException", 400, BackendDownError), ("TooManyRequestsException", 429, BackendDownError),
        ("ServerException", 500, BackendDownError), ("InternalFailure", 503, BackendDownError),
        ("ExpiredTokenException", 403, CredentialsExpiredError), ("AccessDeniedException", 400, CredentialsExpiredError),
        ("UnrecognizedClientException", 403, CredentialsExpiredError), ("InvalidSignatureException", 403, CredentialsExpiredError),
        ("SomethingNew", 400, BackendDownError),
    ]:  # fmt: skip
        stand_in.faults[DESCRIBE[service]] = [RefusalError(code, "said so", status)] * 2
        with pytest.raises(expected, match="said so"):
            look()
        stand_in.faults.clear()
    stand_in.faults[DESCRIBE[service]] = [LostError()]
    assert look().state == "vanished"  # asked once more
    stand_in.faults[DESCRIBE[service]] = [LostError(), LostError()]
    with pytest.raises(BackendDownError, match="does not answer"):
        look()


def test_credentials_that_come_later_are_found(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look = asked(service)
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
    service: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    assert asked(service)().state == "vanished"  # by its ARN
    backend: Any = (
        SageMaker(**SAGEMAKER)
        if service == "sagemaker"
        else AwsBatch(**{**BATCH, "image": None, "job_definition": "d"})
    )
    with pytest.raises(ConfigError, match="no region"):
        backend.submit(Launch(("true",), {}, tmp_path, name="ws-1"))


def test_nobody_answers(service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service.upper()}", f"http://127.0.0.1:{free_port()}")
    backend: Any = (
        SageMaker(**SAGEMAKER)
        if service == "sagemaker"
        else AwsBatch(**{**BATCH, "image": None, "job_definition": "d"})
    )
    with pytest.raises(BackendDownError):
        backend.submit(Launch(("true",), {}, tmp_path, name="ws-1"))
    for call in (backend.status, backend.stop, backend.kill):
        with pytest.raises(BackendDownError):
            call(SAGEMAKER_JOB if service == "sagemaker" else BATCH_JOB)


def test_what_cannot_be_written() -> None:
    for settings in ({"assume_role": "admin"}, {"region": "evil.example/"}, {"no_such": 1}):
        with pytest.raises(ValidationError):
            AwsModel.model_validate(settings)
