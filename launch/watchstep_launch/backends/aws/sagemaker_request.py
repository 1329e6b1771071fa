"""Settings of SageMaker, packaging of the program's source, and the request built from them."""

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
ARCHIVE = "source.tar.gz"
MAX_BYTES = 256 * 1024 * 1024

_EXCLUDED = frozenset((".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", "watchstep-runs", ".watchstep"))  # fmt: skip


def local_files(launch: Launch, source: Source) -> list[PurePosixPath]:
    """Return local files that a job needs, relative to the launch's folder: those that its command names, or all of them."""
    if source == "none":
        return []
    if source == "folder":
        return sorted(_all_below(launch.folder))
    words = {word for word in launch.command if _names_a_file(launch.folder, word)}
    return sorted(PurePosixPath(os.path.normpath(word)) for word in words)


def package(
    launch: Launch, files: Iterable[PurePosixPath], secrets: Mapping[str, str], may_restart: bool
) -> dict[str, bytes]:
    """Return the files to upload to S3: name → bytes.

    Raises:
        SubmissionRejectedError: a file cannot be read, or the files are too large.
    """
    paths = list(files)
    start = Path(__file__).with_name("sagemaker_start.py").read_bytes()
    settings = {
        "command": list(launch.command), "source": bool(paths), "secrets": dict(secrets), "again": may_restart,
    }  # fmt: skip
    objects = {START: start, LAUNCH: json.dumps(settings, indent=1).encode()}
    if paths:
        objects[ARCHIVE] = _archive(launch.folder, paths)
    return objects


def _names_a_file(folder: Path, word: str) -> bool:
    path = PurePosixPath(word)
    if not word or "\0" in word or len(word) > 1024 or path.is_absolute() or ".." in path.parts:
        return False
    try:
        return (folder / path).is_file()
    except OSError:
        return False


def _all_below(folder: Path) -> Iterator[PurePosixPath]:
    top = folder.resolve()
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _EXCLUDED)
        for name in names:
            path = Path(parent, name)
            # Links that lead outside the folder are excluded.
            if path.is_file() and path.resolve().is_relative_to(top) and not name.endswith(".pyc"):
                yield PurePosixPath(path.relative_to(folder).as_posix())


def _archive(folder: Path, files: list[PurePosixPath]) -> bytes:
    """Return a reproducible tarball of files."""
    buffer, size = io.BytesIO(), 0
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for file in files:
            try:
                data = (folder / file).read_bytes()
                mode = (folder / file).stat().st_mode & 0o777
            except OSError as error:
                raise SubmissionRejectedError(
                    f"file {folder / file}: cannot be read ({error.strerror})", "check its permissions"
                ) from error
            size += len(data)
            if size > MAX_BYTES:
                raise SubmissionRejectedError(
                    f"folder {folder}: its files exceed {MAX_BYTES >> 20} MiB, at {file}",
                    "launch from a folder of code, and pass data as inputs={'train': 's3://…'}",
                )
            info = tarfile.TarInfo(str(file))
            info.size, info.mode = len(data), mode
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


Text = Annotated[str, Field(min_length=1, max_length=2500)]
Channel = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=512)]


class SageMakerSettings(AwsModel):
    """User settings of the SageMaker backend."""

    role: RoleArn | None = Field(None, description="Role of the job itself. Required to submit.")
    image_uri: Text | None = Field(
        None, description="Container image that includes watchstep. Required to submit."
    )
    instance_type: Text | None = Field(
        None, description="Instance type, such as ml.p4d.24xlarge. Required to submit."
    )
    output_path: S3Url | None = Field(
        None, description="S3 prefix for the job's files in /opt/ml/model. Required to submit."
    )
    instance_count: int = Field(1, ge=1, description="Number of instances; each runs the command once.")
    volume_size: int = Field(30, ge=1, description="GB of each instance's disk.")
    volume_kms_key: str | None = Field(None, description="Key that encrypts the disks.")
    output_kms_key: str | None = Field(None, description="Key that encrypts the output.")
    max_run: int = Field(86400, ge=1, description="Time limit of the job in seconds.")
    use_spot_instances: bool = Field(
        False, description="Use spot instances; SageMaker restarts the job when it loses one."
    )
    max_wait: int | None = Field(
        None, ge=1, description="Time limit in seconds for a spot job, waiting included; by default max_run."
    )
    max_retry_attempts: int | None = Field(
        None,
        ge=1,
        le=30,
        description="How often SageMaker may restart the job after an internal error.",
    )
    keep_alive_period_in_seconds: int | None = Field(
        None, ge=0, le=3600 * 6, description="How long instances are kept warm for the next job."
    )
    subnets: tuple[Text, ...] = Field((), description="Subnets of the VPC that the job runs in.")
    security_group_ids: tuple[Text, ...] = Field((), description="Security groups of the VPC.")
    encrypt_inter_container_traffic: bool = Field(False, description="Encrypt traffic between instances.")
    enable_network_isolation: bool = Field(
        False, description="Isolate the container from the network, including S3 and the service."
    )
    hyperparameters: Mapping[str, str] = Field(
        default_factory=dict, description="Contents of the container's hyperparameters.json."
    )
    inputs: Mapping[Channel, str | Mapping[str, Any]] = Field(
        default_factory=dict,
        description="Channel name → an S3 prefix, or a Channel of CreateTrainingJob without its name.",
    )
    input_mode: Literal["File", "Pipe", "FastFile"] = Field("File", description="How inputs are provided.")
    checkpoint_s3_uri: S3Url | None = Field(
        None, description="S3 prefix that checkpoints are synchronized with."
    )
    checkpoint_local_path: str = Field("/opt/ml/checkpoints", description="Local folder of checkpoints.")
    tags: Mapping[str, str] = Field(default_factory=dict, description="Tags of the job.")
    entrypoint: tuple[str, ...] = Field(
        (),
        description="The container's entrypoint, which gets the command as arguments; by default the command itself.",
    )
    source: Source = Field(
        "program",
        description="Which local files are uploaded: those that the command names, the whole folder, or none.",
    )
    code_location: S3Url | None = Field(
        None, description="S3 prefix for these files; by default output_path."
    )
    secrets: Mapping[Variable, Arn] = Field(
        default_factory=dict,
        description="Variable → ARN in Secrets Manager or Parameter Store, from which the container fetches its value.",
    )
    extra: Mapping[str, Any] = Field(
        default_factory=dict, description="Further parameters of CreateTrainingJob, in its own format."
    )


MAX_VARIABLES = 100
MAX_VALUE = 512
MAX_WORDS = 100
MAX_WORD = 256

CHANNEL = "watchstep"
START_COMMAND = ("python", f"/opt/ml/input/data/{CHANNEL}/start.py")

_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def fits(words: Sequence[str]) -> bool:
    """Whether SageMaker accepts a command unchanged."""
    return len(words) <= MAX_WORDS and all(len(word) <= MAX_WORD and "\n" not in word for word in words)


def variables(launch: Launch, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the job's environment, without variables whose values come from a secret store.

    Raises:
        SubmissionRejectedError: SageMaker would refuse it.
    """
    everything = {**launch.environment, **launch.secrets}
    environment = {name: value for name, value in everything.items() if name not in secrets}
    if len(environment) > MAX_VARIABLES:
        raise SubmissionRejectedError(
            f"the environment has {len(environment)} variables, more than SageMaker's limit of {MAX_VARIABLES}",
            "move some of them into a file next to the program",
        )
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name) or len(name) > MAX_VALUE:
            raise SubmissionRejectedError(
                f"environment variable {name[:80]!r} has an invalid name for SageMaker",
                "use letters, digits and '_'",
            )
        if len(value) > MAX_VALUE:
            hint = f"keep it in Secrets Manager, and set secrets={{{name!r}: its ARN}}"
            raise SubmissionRejectedError(
                f"environment variable {name} has {len(value)} characters, more than SageMaker's limit of {MAX_VALUE}",
                hint if name in launch.secrets else "move it into a file next to the program",
            )
        if "\0" in value:
            raise SubmissionRejectedError(f"environment variable {name} contains a zero byte", "remove it")
    return environment


def request(
    settings: SageMakerSettings, name: str, words: Sequence[str], environment: Mapping[str, str], code: str
) -> dict[str, Any]:
    """Return the parameters of CreateTrainingJob.

    Args:
        settings: settings of the backend.
        name: the job's name.
        words: the container's command.
        environment: the container's variables.
        code: S3 prefix of the job's files; empty for none.
    """
    entry = settings.entrypoint or words[:1]
    arguments = words if settings.entrypoint else words[1:]
    channels = [_channel(channel, source) for channel, source in settings.inputs.items()]
    if code:
        channels.append(_channel(CHANNEL, code))
    parameters: dict[str, Any] = {
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
        "Environment": dict(environment),
        "Tags": [{"Key": key, "Value": value} for key, value in {**settings.tags, MARK: "1"}.items()],
    }
    result: dict[str, Any] = merged(without_empty(parameters), settings.extra)
    return result


def _channel(name: str, source: Any) -> dict[str, Any]:
    location: dict[str, Any] = {"S3DataType": "S3Prefix", "S3DataDistributionType": "FullyReplicated"}
    if isinstance(source, str):
        mode = {"InputMode": "File"} if name == CHANNEL else {}
        return {"ChannelName": name, **mode, "DataSource": {"S3DataSource": {**location, "S3Uri": source}}}
    return {"ChannelName": name, **source}
