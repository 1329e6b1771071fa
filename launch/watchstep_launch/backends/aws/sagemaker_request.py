"""A launch as SageMaker's CreateTrainingJob takes it, within SageMaker's limits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from watchstep_launch.backend import Launch
from watchstep_launch.backends.aws.calls import MARK
from watchstep_launch.backends.aws.forms import merged, without_empty
from watchstep_launch.backends.aws.sagemaker_settings import SageMakerSettings
from watchstep_launch.errors import SubmissionRejectedError

MOST_VARIABLES = 100
MOST_VALUE = 512
MOST_WORDS = 100
MOST_WORD = 256

CHANNEL = "watchstep"
START = ("python", f"/opt/ml/input/data/{CHANNEL}/start.py")

_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def fits(words: Sequence[str]) -> bool:
    """Whether SageMaker takes a command's words as they are."""
    return len(words) <= MOST_WORDS and all(len(word) <= MOST_WORD and "\n" not in word for word in words)


def variables(launch: Launch, elsewhere: Mapping[str, str]) -> dict[str, str]:
    """The job's environment, without the variables whose values are kept elsewhere.

    Raises:
        SubmissionRejectedError: SageMaker does not take it.
    """
    held = {**launch.environment, **launch.secrets}
    given = {name: value for name, value in held.items() if name not in elsewhere}
    if len(given) > MOST_VARIABLES:
        raise SubmissionRejectedError(
            f"environment: has {len(given)} variables, and SageMaker takes {MOST_VARIABLES}",
            "put some of them into a file beside the program",
        )
    for name, value in given.items():
        if not _VARIABLE.fullmatch(name) or len(name) > MOST_VALUE:
            raise SubmissionRejectedError(
                f"environment variable {name[:80]!r}: SageMaker does not take its name",
                "use letters, digits and '_'",
            )
        if len(value) > MOST_VALUE:
            hint = f"keep it in Secrets Manager, and set secrets={{{name!r}: its ARN}}"
            raise SubmissionRejectedError(
                f"environment variable {name}: has {len(value)} characters, and SageMaker takes {MOST_VALUE}",
                hint if name in launch.secrets else "put it into a file beside the program",
            )
        if "\0" in value:
            raise SubmissionRejectedError(f"environment variable {name}: has a zero byte", "leave it out")
    return given


def request(
    settings: SageMakerSettings, name: str, words: Sequence[str], given: Mapping[str, str], code: str
) -> dict[str, Any]:
    """What CreateTrainingJob is asked.

    Args:
        settings: of the backend.
        name: of the job.
        words: of the container's command.
        given: its variables.
        code: S3 prefix of what was put there for it; empty for nothing.
    """
    entry = settings.entrypoint or words[:1]
    arguments = words if settings.entrypoint else words[1:]
    channels = [_channel(channel, source) for channel, source in settings.inputs.items()]
    if code:
        channels.append(_channel(CHANNEL, code))
    asked: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": settings.role,
        "AlgorithmSpecification": {
            "TrainingImage": settings.image_uri,
            "TrainingInputMode": settings.input_mode,
            "ContainerEntrypoint": list(entry),
            "ContainerArguments": list(arguments),
        },
        "HyperParameters": dict(settings.hyperparameters),
        "InputDataConfig": channels,
        "OutputDataConfig": {"S3OutputPath": settings.output_path, "KmsKeyId": settings.output_kms_key},
        "ResourceConfig": {
            "InstanceType": settings.instance_type,
            "InstanceCount": settings.instance_count,
            "VolumeSizeInGB": settings.volume_size,
            "VolumeKmsKeyId": settings.volume_kms_key,
            "KeepAlivePeriodInSeconds": settings.keep_alive_period_in_seconds,
        },
        "StoppingCondition": {
            "MaxRuntimeInSeconds": settings.max_run,
            "MaxWaitTimeInSeconds": settings.max_wait
            or (settings.max_run if settings.use_spot_instances else None),
        },
        "VpcConfig": {
            "Subnets": list(settings.subnets),
            "SecurityGroupIds": list(settings.security_group_ids),
        },
        "CheckpointConfig": {
            "S3Uri": settings.checkpoint_s3_uri,
            "LocalPath": settings.checkpoint_local_path if settings.checkpoint_s3_uri else None,
        },
        "RetryStrategy": {"MaximumRetryAttempts": settings.max_retry_attempts},
        "EnableManagedSpotTraining": settings.use_spot_instances,
        "EnableNetworkIsolation": settings.enable_network_isolation,
        "EnableInterContainerTrafficEncryption": settings.encrypt_inter_container_traffic,
        "Environment": dict(given),
        "Tags": [{"Key": key, "Value": value} for key, value in {**settings.tags, MARK: "1"}.items()],
    }
    made: dict[str, Any] = merged(without_empty(asked), settings.extra)
    return made


def _channel(name: str, source: Any) -> dict[str, Any]:
    place: dict[str, Any] = {"S3DataType": "S3Prefix", "S3DataDistributionType": "FullyReplicated"}
    if isinstance(source, str):
        mode = {"InputMode": "File"} if name == CHANNEL else {}
        return {"ChannelName": name, **mode, "DataSource": {"S3DataSource": {**place, "S3Uri": source}}}
    return {"ChannelName": name, **source}
