"""Backends on AWS's stand-ins, made ready for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3

from tests.conftest import S3
from tests.launch.backends.aws.aws_stand_in import ACCOUNT, REGION
from tests.launch.backends.aws.batch_stand_in import BatchStandIn
from tests.launch.backends.aws.sagemaker_stand_in import SageMakerStandIn
from watchstep_launch.backend import JobHandle, JobStatus
from watchstep_launch.backends.aws.batch import AwsBatch
from watchstep_launch.backends.aws.sagemaker import SageMaker

ROLE = f"arn:aws:iam::{ACCOUNT}:role/training"
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/train:1"
QUEUE = "gpu"
SAGEMAKER: dict[str, Any] = {
    "role": ROLE, "image_uri": IMAGE, "instance_type": "ml.m5.large", "output_path": "s3://jobs/out",
}  # fmt: skip
BATCH: dict[str, Any] = {"job_queue": QUEUE, "image": IMAGE, "vcpus": 1, "memory_mib": 2048}


class HurriedSageMaker(SageMaker):
    """The 120 seconds between SIGTERM and SIGKILL pass when `kill` is called, and not before."""

    def kill(self, job: JobHandle) -> JobStatus:
        status = super().kill(job)
        _HURRIED["sagemaker"](job.id)
        return status


class HurriedAwsBatch(AwsBatch):
    """The agent's stop timeout passes when `kill` is called, and not before."""

    def kill(self, job: JobHandle) -> JobStatus:
        status = super().kill(job)
        _HURRIED["batch"](job.id)
        return status


_HURRIED: dict[str, Any] = {}


def hurried_sagemaker(stand_in: SageMakerStandIn, **changes: Any) -> SageMaker:
    _HURRIED["sagemaker"] = stand_in.pass_time
    return HurriedSageMaker(**{**SAGEMAKER, **changes})


def hurried_batch(stand_in: BatchStandIn, **changes: Any) -> AwsBatch:
    _HURRIED["batch"] = stand_in.pass_time
    return HurriedAwsBatch(**{**BATCH, **changes})


def make_queue(s3: S3) -> None:
    """A queue of moto's, which wants to be told of all that is below one."""
    s3.post("config", json.dumps({"batch": {"use_docker": False}}).encode())
    ec2, iam, batch = (boto3.client(name, region_name=REGION) for name in ("ec2", "iam", "batch"))
    subnet = ec2.describe_subnets()["Subnets"][0]
    group = ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]
    role = iam.create_role(RoleName="batch", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    resources = {
        "type": "FARGATE", "maxvCpus": 16, "subnets": [subnet["SubnetId"]], "securityGroupIds": [group],
    }  # fmt: skip
    environment = batch.create_compute_environment(
        computeEnvironmentName="all", type="MANAGED", serviceRole=role, computeResources=resources
    )["computeEnvironmentArn"]
    order = [{"order": 1, "computeEnvironment": environment}]
    batch.create_job_queue(jobQueueName=QUEUE, state="ENABLED", priority=1, computeEnvironmentOrder=order)


def uploaded(prefix: str) -> dict[str, bytes]:
    """What lies below a prefix of the bucket "jobs": key → bytes."""
    s3 = boto3.client("s3", region_name=REGION)
    found = s3.list_objects_v2(Bucket="jobs", Prefix=prefix).get("Contents", [])
    return {one["Key"]: s3.get_object(Bucket="jobs", Key=one["Key"])["Body"].read() for one in found}


def in_folder(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path
