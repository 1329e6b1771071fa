"""Who records: project, run, attempt, worker and node, from arguments, then from the environment; and the first documents."""

from __future__ import annotations

import os
import platform
import re
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watchstep.capture.config import CaptureConfig
from watchstep.errors import ConfigError
from watchstep.format import documents
from watchstep.format.layout import WriterId, check_name
from watchstep.platform.process import ProcessIdentity
from watchstep.stopping import OnStop

PROJECT = "WATCHSTEP_PROJECT"
RUN = "WATCHSTEP_RUN"
ATTEMPT = "WATCHSTEP_ATTEMPT"


@dataclass(frozen=True)
class Identity:
    """Who records.

    Attributes:
        project: the project's name.
        run: the run's id.
        attempt: the attempt that this worker means to join or claim.
        worker: the rank, from 0.
        world_size: how many workers the attempt has.
        node: the machine's name, as a part of a key.
        local_size: how many of the workers are on this machine, as far as the launcher says so.
        local_rank: the rank among these, from 0.
    """

    project: str
    run: str
    attempt: str
    worker: int = 0
    world_size: int = 1
    node: str = "node"
    local_size: int = 1
    local_rank: int = 0

    @property
    def nodes(self) -> int:
        """About how many machines the attempt has."""
        return -(-self.world_size // max(1, self.local_size))

    def writer(self, suffix: str = "") -> WriterId:
        """The writer of this worker's segments."""
        return WriterId(self.attempt, self.node, f"w{self.worker}{suffix}")


def new_run_id() -> str:
    """A run id that sorts by time: ``20261120-211500-3fa9c1``, in UTC."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def new_nonce() -> str:
    """An attempt's id, drawn once by the launcher and given to all ranks."""
    return f"a{secrets.token_hex(4)}"


def resolve(project: str | None, run: str | None) -> Identity:
    """Settle who records.

    Args:
        project: or ``WATCHSTEP_PROJECT``, or "default".
        run: or ``WATCHSTEP_RUN``, or a new id.

    Raises:
        BadNameError: a name cannot be part of a key.
        ConfigError: several ranks, and nothing that says which run and attempt they share.
    """
    environment = os.environ
    worker, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
    shared = _shared_nonce(world)
    run = run or environment.get(RUN) or (f"run-{shared}" if shared else new_run_id())
    attempt = environment.get(ATTEMPT) or shared or new_nonce()
    restarts = _number("TORCHELASTIC_RESTART_COUNT", 0)
    if restarts:
        attempt = f"{attempt}-r{restarts}"
    local_size = min(world, max(1, _local_size(world if shared else 1)))
    return Identity(
        project=check_name("project", project or environment.get(PROJECT) or "default"),
        run=check_name("run", run),
        attempt=check_name("attempt", attempt),
        worker=worker,
        world_size=world,
        node=node_name(),
        local_size=local_size,
        local_rank=_local_rank(worker % local_size) if world > 1 else 0,
    )


def node_name() -> str:
    """This machine's name, with what a key cannot hold replaced."""
    name = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")
    return name[:64] or "node"


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else otherwise
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r}: not a number", "unset it, or set a number"
        ) from None


_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""torchrun and what follows it; Open MPI; MPICH and Intel MPI."""


def _local_size(otherwise: int) -> int:
    named = next((name for name in _LOCAL_SIZES if os.environ.get(name)), "")
    return _number(named, otherwise) if named else otherwise


_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Of the same, and Slurm."""


def _local_rank(otherwise: int) -> int:
    named = next((name for name in _LOCAL_RANKS if os.environ.get(name)), "")
    return _number(named, otherwise) if named else otherwise


def _shared_nonce(world: int) -> str:
    """What all ranks of one launch can derive by themselves; empty where there is one rank, or a launcher's nonce.

    Ranks of one machine share their parent. Across machines nothing is shared but what the launcher sets.
    """
    if world == 1 or os.environ.get(ATTEMPT):
        return ""
    local = _number("LOCAL_WORLD_SIZE", world)
    if local != world:
        raise ConfigError(
            f"{world} ranks on several machines, and nothing says which attempt they share",
            f"start them with 'watchstep run', or set {RUN} and {ATTEMPT} to the same values on every machine",
        )
    parent = os.getppid()
    started = ProcessIdentity.of(parent).start_ticks if Path("/proc").is_dir() else 0
    return f"p{parent}-{started}"


def run_document(
    identity: Identity, rules: tuple[dict[str, Any], ...], config: CaptureConfig
) -> documents.RunDocument:
    """What is told of the run, by its first attempt."""
    return documents.RunDocument(
        project=identity.project,
        run=identity.run,
        created_ns=time.time_ns(),
        rules=rules,
        config={
            "collections": {name: chosen.as_data() for name, chosen in config.chosen.items()},
            "snapshots": vars(config.snapshots),
            "system": vars(config.sampling) if config.sampling is not None else None,
            "overhead_budget": config.overhead_budget,
            "gradients": config.gradients,
        },
        environment={
            "python": platform.python_version(),
            "host": socket.gethostname(),
            "program": Path(sys.argv[0]).name if sys.argv else "",
        },
    )


def attempt_document(identity: Identity, on_stop: OnStop) -> documents.AttemptDocument:
    """What is told of this attempt, by each worker alike."""
    return documents.AttemptDocument(
        attempt=identity.attempt,
        started_ns=time.time_ns(),
        world_size=identity.world_size,
        on_stop="callback" if callable(on_stop) or on_stop == "check" else on_stop,
        host=socket.gethostname(),
    )
