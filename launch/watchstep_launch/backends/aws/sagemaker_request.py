"""Settings of SageMaker, the program's source, and the request made from them."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field

from watchstep_launch.backend import Launch, SubmissionRejectedError
from watchstep_launch.backends.aws.calls import MARK, Arn, AwsModel, RoleArn, S3Url, merged, without_empty

Source = Literal["program", "folder", "none"]

START = "start.py"
LAUNCH = "launch.json"
PACKED = "source.tar.gz"
MOST_BYTES = 256 * 1024 * 1024

_LEFT_OUT = frozenset((".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", "watchstep-runs", ".watchstep"))  # fmt: skip


def local_files(launch: Launch, source: Source) -> list[PurePosixPath]:
    """Files of the launcher's that a job needs, below the launch's folder: those that its command names, or all of them."""
    if source == "none":
        return []
    if source == "folder":
        return sorted(_all_below(launch.folder))
    named = {word for word in launch.command if _names_a_file(launch.folder, word)}
    return sorted(PurePosixPath(os.path.normpath(word)) for word in named)


def packed(
    launch: Launch, files: Iterable[PurePosixPath], secrets: Mapping[str, str], again: bool
) -> dict[str, bytes]:
    """What to put on S3: name → bytes.

    Raises:
        SubmissionRejectedError: a file cannot be read, or there is too much of them.
    """
    held = list(files)
    start = Path(__file__).with_name("sagemaker_start.py").read_bytes()
    asked = {"command": list(launch.command), "source": bool(held), "secrets": dict(secrets), "again": again}
    objects = {START: start, LAUNCH: json.dumps(asked, indent=1).encode()}
    if held:
        objects[PACKED] = _archive(launch.folder, held)
    return objects


def _names_a_file(folder: Path, word: str) -> bool:
    place = PurePosixPath(word)
    if not word or "\0" in word or len(word) > 1024 or place.is_absolute() or ".." in place.parts:
        return False
    try:
        return (folder / place).is_file()
    except OSError:
        return False


def _all_below(folder: Path) -> Iterator[PurePosixPath]:
    top = folder.resolve()
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        for name in names:
            path = Path(at, name)
            # A link leads no further than the folder that was given.
            if path.is_file() and path.resolve().is_relative_to(top) and not name.endswith(".pyc"):
                yield PurePosixPath(path.relative_to(folder).as_posix())


def _archive(folder: Path, files: list[PurePosixPath]) -> bytes:
    """A tarball that is the same for the same files."""
    held, size = io.BytesIO(), 0
    with (
        gzip.GzipFile(fileobj=held, mode="wb", mtime=0, compresslevel=6) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for file in files:
            try:
                data = (folder / file).read_bytes()
                mode = (folder / file).stat().st_mode & 0o777
            except OSError as error:
                raise SubmissionRejectedError(
                    f"file {folder / file}: cannot be read ({error.strerror})", "see to its permissions"
                ) from error
            size += len(data)
            if size > MOST_BYTES:
                raise SubmissionRejectedError(
                    f"folder {folder}: its files have more than {MOST_BYTES >> 20} MiB, at {file}",
                    "launch from a folder of code, and give data as inputs={'train': 's3://…'}",
                )
            about = tarfile.TarInfo(str(file))
            about.size, about.mode = len(data), mode
            archive.addfile(about, io.BytesIO(data))
    return held.getvalue()


Text = Annotated[str, Field(min_length=1, max_length=2500)]
Channel = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=512)]


class SageMakerSettings(AwsModel):
    """What users set of a backend on Amazon SageMaker."""

    role: RoleArn | None = Field(None, description="The role that the job itself has. Needed to submit.")
    image_uri: Text | None = Field(None, description="The image, with watchstep in it. Needed to submit.")
    instance_type: Text | None = Field(None, description="ml.p4d.24xlarge, say. Needed to submit.")
    output_path: S3Url | None = Field(
        None, description="Where SageMaker puts what the job leaves in /opt/ml/model. Needed to submit."
    )
    instance_count: int = Field(1, ge=1, description="Instances; each runs the command once.")
    volume_size: int = Field(30, ge=1, description="GB of each instance's disk.")
    volume_kms_key: str | None = Field(None, description="Key that encrypts the disks.")
    output_kms_key: str | None = Field(None, description="Key that encrypts the output.")
    max_run: int = Field(86400, ge=1, description="Seconds that the job may take.")
    use_spot_instances: bool = Field(
        False, description="Take spot instances; SageMaker starts the job again when it loses one."
    )
    max_wait: int | None = Field(
        None, ge=1, description="Seconds that a spot job may wait and take; max_run where it is left out."
    )
    max_retry_attempts: int | None = Field(
        None,
        ge=1,
        le=30,
        description="How often SageMaker may start the job again after an error of its own.",
    )
    keep_alive_period_in_seconds: int | None = Field(
        None, ge=0, le=3600 * 6, description="So long the instances are kept warm for the next job."
    )
    subnets: tuple[Text, ...] = Field((), description="Subnets of the VPC that the job runs in.")
    security_group_ids: tuple[Text, ...] = Field((), description="Security groups there.")
    encrypt_inter_container_traffic: bool = Field(
        False, description="Encrypt what instances say to each other."
    )
    enable_network_isolation: bool = Field(
        False, description="Keep the container from all network, S3 and the service included."
    )
    hyperparameters: Mapping[str, str] = Field(
        default_factory=dict, description="As they are, to the container's hyperparameters.json."
    )
    inputs: Mapping[Channel, str | Mapping[str, Any]] = Field(
        default_factory=dict,
        description="Channel: an S3 prefix, or a Channel of CreateTrainingJob without its name.",
    )
    input_mode: Literal["File", "Pipe", "FastFile"] = Field("File", description="How inputs come.")
    checkpoint_s3_uri: S3Url | None = Field(
        None, description="S3 prefix that checkpoints are kept in step with."
    )
    checkpoint_local_path: str = Field("/opt/ml/checkpoints", description="The folder that is.")
    tags: Mapping[str, str] = Field(default_factory=dict, description="Tags of the job.")
    entrypoint: tuple[str, ...] = Field(
        (),
        description="The container's entrypoint, which gets the command as arguments; the command itself where it is left out.",
    )
    source: Source = Field(
        "program",
        description="What of the launcher's folder goes along: the files that the command names, the folder, or none.",
    )
    code_location: S3Url | None = Field(
        None, description="S3 prefix for that; output_path where it is left out."
    )
    secrets: Mapping[Variable, Arn] = Field(
        default_factory=dict,
        description="Variable: ARN in Secrets Manager or Parameter Store, from which the container fetches its value.",
    )
    extra: Mapping[str, Any] = Field(
        default_factory=dict, description="Whatever else CreateTrainingJob takes, in its own form."
    )


MOST_VARIABLES = 100
MOST_VALUE = 512
MOST_WORDS = 100
MOST_WORD = 256

CHANNEL = "watchstep"
START_COMMAND = ("python", f"/opt/ml/input/data/{CHANNEL}/start.py")

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
