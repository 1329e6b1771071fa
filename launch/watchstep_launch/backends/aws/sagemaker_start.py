"""Starts the program in SageMaker's container. Run as a script, with Python alone; boto3 where a secret is to be fetched.

It lies in a channel of the job's, ``/opt/ml/input/data/watchstep``, beside ``launch.json``, which says: ``command``,
``source`` (whether ``source.tar.gz`` is there as well), ``secrets`` (variable → where its value is kept) and ``again``
(whether SageMaker may start the job again). It becomes the program, so that signals and exit codes are the program's own.
"""

import json
import os
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
"""``/opt/ml``, in a container."""

MISSING = 127
FAILED = 125


def main() -> None:
    """Unpack, set variables, become the program."""
    asked = json.loads((HERE / "launch.json").read_text(encoding="utf-8"))
    variables = dict(os.environ)
    variables.update(_nodes())
    try:
        for name, place in asked["secrets"].items():
            variables[name] = _secret(place)
    except Exception as error:  # noqa: BLE001 - boto3's have no common base, and none may go on without the secret
        sys.exit(_tell(f"secret {name} cannot be had from {place}: {error}", FAILED))
    if asked["again"]:
        variables.setdefault("WATCHSTEP_RESTARTS", str(_starts_before()))
    if asked["source"]:
        _unpack(ROOT / "code")
        os.chdir(ROOT / "code")
    command = asked["command"]
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, variables)  # noqa: S606 - it is what the job is for
    except OSError as error:
        sys.exit(_tell(f"program {command[0]!r} cannot be started: {error.strerror}", MISSING))


def _nodes() -> "dict[str, str]":
    """What ``torchrun`` finds its nodes by, where there are several."""
    place = ROOT / "input" / "config" / "resourceconfig.json"
    try:
        told = json.loads(place.read_text(encoding="utf-8"))
        hosts, mine = sorted(told["hosts"]), told["current_host"]
    except (OSError, ValueError, KeyError):
        return {}
    if len(hosts) < 2:
        return {}
    named = {
        "PET_NNODES": str(len(hosts)),
        "PET_NODE_RANK": str(hosts.index(mine)),
        "PET_MASTER_ADDR": hosts[0],
        "PET_MASTER_PORT": "29500",
    }
    return {name: os.environ.get(name, value) for name, value in named.items()}


def _secret(place: str) -> str:
    import boto3

    region, service = place.split(":")[3], place.split(":")[2]
    if service == "ssm":
        client = boto3.client("ssm", region_name=region)
        name = place.split(":", 5)[5][len("parameter") :]
        answer = client.get_parameter(Name=name if name.count("/") > 1 else name[1:], WithDecryption=True)
        return str(answer["Parameter"]["Value"])
    client = boto3.client("secretsmanager", region_name=region)
    return str(client.get_secret_value(SecretId=place)["SecretString"])


def _starts_before() -> int:
    """How often SageMaker has started this job before. All its nodes are told the same, so that they name one attempt."""
    try:
        import boto3

        arn = os.environ["TRAINING_JOB_ARN"]
        client = boto3.client("sagemaker", region_name=arn.split(":")[3])
        found = client.describe_training_job(TrainingJobName=os.environ["TRAINING_JOB_NAME"])
        passed = found.get("SecondaryStatusTransitions", [])
        return sum(one["Status"] in ("Interrupted", "Restarting") for one in passed)
    except Exception as error:  # noqa: BLE001 - a job goes on without it
        _tell(f"SageMaker does not say whether it started this job before: {error}", 0)
        return 0


def _unpack(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(HERE / "source.tar.gz") as packed:
        if hasattr(tarfile, "data_filter"):
            packed.extractall(folder, filter="data")
        else:
            packed.extractall(folder)  # noqa: S202 - the launcher packed it


def _tell(what: str, code: int) -> int:
    sys.stderr.write(f"watchstep: {what}\n")
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
