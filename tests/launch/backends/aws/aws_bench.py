"""Backends on AWS's stand-ins, made ready for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3

from tests.launch.backends.aws.aws_stand_in import ACCOUNT, REGION
from tests.launch.backends.aws.sagemaker_stand_in import SageMakerStandIn
from watchstep_launch.backend import JobHandle, JobStatus
from watchstep_launch.backends.aws.sagemaker import SageMaker

ROLE = f"arn:aws:iam::{ACCOUNT}:role/training"
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/train:1"
SAGEMAKER: dict[str, Any] = {
    "role": ROLE, "image_uri": IMAGE, "instance_type": "ml.m5.large", "output_path": "s3://jobs/out",
}  # fmt: skip


class HurriedSageMaker(SageMaker):
    """The 120 seconds between SIGTERM and SIGKILL pass when `kill` is called, and not before."""

    def kill(self, job: JobHandle) -> JobStatus:
        status = super().kill(job)
        _HURRIED["sagemaker"](job.id)
        return status


_HURRIED: dict[str, Any] = {}


def hurried_sagemaker(stand_in: SageMakerStandIn, **changes: Any) -> SageMaker:
    _HURRIED["sagemaker"] = stand_in.pass_time
    return HurriedSageMaker(**{**SAGEMAKER, **changes})


def uploaded(prefix: str) -> dict[str, bytes]:
    """What lies below a prefix of the bucket "jobs": key → bytes."""
    s3 = boto3.client("s3", region_name=REGION)
    found = s3.list_objects_v2(Bucket="jobs", Prefix=prefix).get("Contents", [])
    return {one["Key"]: s3.get_object(Bucket="jobs", Key=one["Key"])["Body"].read() for one in found}


def in_folder(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path
