"""Starts the program in SageMaker's container. Runs as a script without further packages, except boto3 to fetch secrets.

The script is in the job's channel ``/opt/ml/input/data/watchstep``, next to ``launch.json`` with the keys ``command``,
``source`` (whether ``source.tar.gz`` exists), ``secrets`` (variable → ARN of its value) and ``again``
(whether SageMaker may restart the job). It is replaced by the program, so that signals and exit codes are the program's own.
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
    """Unpack files, set variables and execute the program."""
    settings = json.loads((HERE / "launch.json").read_text(encoding="utf-8"))
    variables = dict(os.environ)
    variables.update(_nodes())
    try:
        for name, arn in settings["secrets"].items():
            variables[name] = _secret(arn)
    except Exception as error:  # noqa: BLE001 - boto3's errors have no common base, and the secret is required
        sys.exit(_report(f"secret {name} cannot be fetched from {arn}: {error}", FAILED))
    if settings["again"]:
        variables.setdefault("WATCHSTEP_RESTARTS", str(_starts_before()))
    if settings["source"]:
        _unpack(ROOT / "code")
        os.chdir(ROOT / "code")
    command = settings["command"]
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, variables)  # noqa: S606 - this is the job's purpose
    except OSError as error:
        sys.exit(_report(f"program {command[0]!r} cannot be started: {error.strerror}", MISSING))


def _nodes() -> "dict[str, str]":
    """Return variables by which ``torchrun`` finds its nodes; empty for a single node."""
    path = ROOT / "input" / "config" / "resourceconfig.json"
    try:
        resources = json.loads(path.read_text(encoding="utf-8"))
        hosts, current = sorted(resources["hosts"]), resources["current_host"]
    except (OSError, ValueError, KeyError):
        return {}
    if len(hosts) < 2:
        return {}
    variables = {
        "PET_NNODES": str(len(hosts)),
        "PET_NODE_RANK": str(hosts.index(current)),
        "PET_MASTER_ADDR": hosts[0],
        "PET_MASTER_PORT": "29500",
    }
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def _secret(arn: str) -> str:
    import boto3

    region, service = arn.split(":")[3], arn.split(":")[2]
    if service == "ssm":
        client = boto3.client("ssm", region_name=region)
        name = arn.split(":", 5)[5][len("parameter") :]
        response = client.get_parameter(Name=name if name.count("/") > 1 else name[1:], WithDecryption=True)
        return str(response["Parameter"]["Value"])
    client = boto3.client("secretsmanager", region_name=region)
    return str(client.get_secret_value(SecretId=arn)["SecretString"])


def _starts_before() -> int:
    """Return how often SageMaker has started this job before. All nodes get the same answer, so that they name the same attempt."""
    try:
        import boto3

        arn = os.environ["TRAINING_JOB_ARN"]
        client = boto3.client("sagemaker", region_name=arn.split(":")[3])
        description = client.describe_training_job(TrainingJobName=os.environ["TRAINING_JOB_NAME"])
        transitions = description.get("SecondaryStatusTransitions", [])
        return sum(transition["Status"] in ("Interrupted", "Restarting") for transition in transitions)
    except Exception as error:  # noqa: BLE001 - the job runs without it
        _report(f"the number of earlier starts of this job is unknown: {error}", 0)
        return 0


def _unpack(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(HERE / "source.tar.gz") as packed:
        if hasattr(tarfile, "data_filter"):
            packed.extractall(folder, filter="data")
        else:
            packed.extractall(folder)  # noqa: S202 - the launcher packed it


def _report(message: str, code: int) -> int:
    sys.stderr.write(f"watchstep: {message}\n")
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
