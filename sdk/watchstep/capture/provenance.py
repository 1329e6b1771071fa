"""Provenance of an attempt: command line, folder, commit, versions, devices and environment variables, without secrets."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HIDDEN = "(hidden)"
"""What is recorded instead of a secret."""

CUT = "…"
"""The end of a value that is too long."""

_PACKAGES = (
    "watchstep", "torch", "torchvision", "numpy", "transformers", "datasets", "accelerate", "peft", "deepspeed", "lightning",
    "pytorch-lightning", "timm", "jax", "flax", "optax", "keras", "tensorflow", "xgboost", "lightgbm",
)  # fmt: skip
_FRAMEWORKS = ("torch", "jax")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID",
    "NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "XLA_FLAGS", "JAX_PLATFORMS", "KERAS_BACKEND", "TF_DETERMINISTIC_OPS",
    "TF_ENABLE_ONEDNN_OPTS", "WATCHSTEP_EXPLAIN", "WATCHSTEP_ON_NONFINITE", "WATCHSTEP_ON_STOP",
)  # fmt: skip
"""The environment variables that are recorded: they change results or speed, and no secret belongs in them."""

_LONGEST = {"command": 4000}
_MOST_CHARACTERS = 500
_MOST_PROGRAM_BYTES = 4 * 1024 * 1024
_GIT_SECONDS = 1.0
_MAX_PARENTS = 32
_MAX_REFERENCES = 4 * 1024 * 1024
_COMMIT_DIGITS = 40
_GPUS = Path("/proc/driver/nvidia/gpus")

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_SECRET_WORDS = frozenset(
    [
        "key",
        "apikey",
        "token",
        "secret",
        "password",
        "passwd",
        "pwd",
        "passphrase",
        "credential",
        "credentials",
        "auth",
        "authorization",
        "bearer",
        "cookie",
        "dsn",
    ]
)
_ASSIGNMENT = re.compile(r"(?P<name>[^=\s]+)=(?P<value>.*)", re.DOTALL)
_SECRET_SHAPES = (
    re.compile(r"(?<=://)[^/@\s]+(?=@)"),  # user and password of a URL
    re.compile(r"(?<=[?&])(?:sig|signature|token|X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token)=[^&\s]+", re.IGNORECASE),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"\b(?:gh[pousr]|github_pat|glpat|hf|sk|pk|rk|xox[abeprs]|wst|ws|npm|pypi|dckr_pat)[-_][A-Za-z0-9_-]{16,}"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?"),  # a JSON web token
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL),
    re.compile(r"(?i)\bbearer\s+\S+"),
    re.compile(r"\b[0-9a-fA-F]{32,}\b"),
    re.compile(r"\b(?=[A-Za-z0-9]*[a-z])(?=[A-Za-z0-9]*[A-Z])(?=[A-Za-z0-9]*[0-9])[A-Za-z0-9]{24,}\b"),
)  # fmt: skip


def provenance() -> dict[str, str]:
    """Return the provenance of the running program, by the names under which it is shown; what is unknown is left out.

    ``git`` runs for a second at most. Values have at most 500 characters, the command line 4000.
    """
    folder = Path.cwd()
    commit = git_commit(folder)
    found = {
        "program": Path(sys.argv[0]).name if sys.argv else "",
        "program digest": program_digest(Path(sys.argv[0])) if sys.argv else "",
        "command": shlex.join(without_secrets(sys.orig_argv)),
        "folder": str(folder),
        "commit": commit,
        "uncommitted changes": _changes(folder) if commit else "",
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "devices": ", ".join(_devices()),
        **{f"package {name}": installed for name, installed in package_versions().items()},
        **{
            f"variable {name}": "".join(without_secrets([os.environ[name]]))
            for name in _VARIABLES
            if name in os.environ
        },
    }
    return {
        name: _short(value, _LONGEST.get(name, _MOST_CHARACTERS)) for name, value in found.items() if value
    }


def program_data() -> dict[str, Any]:
    """Return what a bundle states about the running program: its arguments, file, folder, commit and versions."""
    return {
        "argv": without_secrets(sys.argv),
        "digest": program_digest(Path(sys.argv[0])) if sys.argv else "",
        "folder": str(Path.cwd()),
        "git_commit": git_commit(Path.cwd()),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": package_versions(),
    }


def changes_since(recorded: Mapping[str, Any], program: Path) -> list[str]:
    """Return how a program differs from the one that a bundle was recorded of, as sentences.

    Args:
        recorded: The result of `program_data` at that time, from a bundle that may be damaged.
        program: The file of the program now.
    """
    changes = []
    argv, digest, versions = (recorded.get(name) for name in ("argv", "digest", "versions"))
    name = Path(str(argv[0])).name if isinstance(argv, list) and argv else ""
    if digest and program.name == name and digest != program_digest(program):
        changes.append(f"{name} has changed since this step was recorded")
    now = package_versions()
    for package, before in versions.items() if isinstance(versions, dict) else ():
        if package in now and package in _FRAMEWORKS and before != now[package]:
            changes.append(
                f"the step was recorded with {package} {before!s:.40}, and is replayed with {now[package]}"
            )
    return changes


def _short(value: str, most: int) -> str:
    text = value.encode("utf-8", "replace").decode()
    return text if len(text) <= most else text[: most - 1] + CUT


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `HIDDEN` in place of secrets.

    A secret has a name with a word such as ``token`` or ``password`` (``--api-key X``, ``token=X``), or a value of a known shape: a key
    of a provider, a JSON web token, the password of a URL, or a long random text.
    """
    kept: list[str] = []
    follows_secret = False
    for argument in arguments:
        is_option = argument.startswith("-")
        if follows_secret and not is_option:
            kept.append(HIDDEN)
            follows_secret = False
            continue
        assigned = _ASSIGNMENT.fullmatch(argument)
        if assigned is not None and _is_secret_name(assigned["name"]):
            kept.append(f"{assigned['name']}={HIDDEN}")
        else:
            kept.append(_shapeless(argument))
        follows_secret = is_option and assigned is None and _is_secret_name(argument)
    return kept


def _is_secret_name(name: str) -> bool:
    return not _SECRET_WORDS.isdisjoint(word.lower() for word in _WORD.findall(name))


def _shapeless(text: str) -> str:
    for shape in _SECRET_SHAPES:
        text = shape.sub(HIDDEN, text)
    return text


def program_digest(program: Path) -> str:
    """Return the SHA-256 of the program's file, 16 digits; empty if it cannot be read."""
    try:
        if program.is_file() and program.stat().st_size <= _MOST_PROGRAM_BYTES:
            return hashlib.sha256(program.read_bytes()).hexdigest()[:16]
    except OSError:
        pass
    return ""


def git_commit(folder: Path) -> str:
    """Return the commit that is checked out in a folder, read from git's files; empty if there is none.

    No process is started: a training process may have threads and devices that a fork would disturb.
    """
    try:
        for parent in [folder, *list(folder.parents)[:_MAX_PARENTS]]:
            place = parent / ".git"
            if place.is_file():  # a worktree or submodule
                place = parent / place.read_text().removeprefix("gitdir:").strip()
            if (place / "HEAD").is_file():
                return _commit_of(place)
    except (OSError, ValueError):
        pass
    return ""


def _commit_of(place: Path) -> str:
    head = (place / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head[:_COMMIT_DIGITS]
    name = head.removeprefix("ref:").strip()
    common = place / "commondir"
    base = place / common.read_text().strip() if common.is_file() else place
    for folder in (place, base):
        if (folder / name).is_file():
            return (folder / name).read_text().strip()[:_COMMIT_DIGITS]
    packed = base / "packed-refs"
    if packed.is_file() and packed.stat().st_size < _MAX_REFERENCES:
        for line in packed.read_text().splitlines():
            if line.endswith(f" {name}"):
                return line[:_COMMIT_DIGITS]
    return ""


def _changes(folder: Path) -> str:
    """Return how many tracked files differ from the commit; empty without an answer of ``git``."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false"]
    try:
        answer = subprocess.run(  # noqa: S603 - arguments are fixed
            [*command, "status", "--porcelain", "--untracked-files=no"],
            cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    changed = len(answer.stdout.splitlines())
    return f"{changed} {'file' if changed == 1 else 'files'}" if changed else "none"


def _devices() -> Iterator[str]:
    """Yield the names of the machine's NVIDIA GPUs, without starting CUDA in the program."""
    try:
        for place in sorted(_GPUS.iterdir()):
            lines = (place / "information").read_text(errors="replace").splitlines()
            yield from (line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))
    except OSError:
        return


def package_versions() -> dict[str, str]:
    """Return the versions of the installed frameworks and of Watchstep, by the name of the package."""
    return {name: found for name in _PACKAGES if (found := _version(name))}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
