"""Identity of a recorder: project, run, attempt, worker and node, from arguments or the environment; and the first documents."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watchstep.capture.config import CaptureConfig
from watchstep.capture.document.document import changes_of
from watchstep.capture.provenance import provenance
from watchstep.errors import ConfigError
from watchstep.format import documents
from watchstep.format.layout import WriterId, check_name
from watchstep.platform.process import ProcessIdentity
from watchstep.seeds import recorded_seeds
from watchstep.stopping import OnStop

PROJECT = "WATCHSTEP_PROJECT"
RUN = "WATCHSTEP_RUN"
ATTEMPT = "WATCHSTEP_ATTEMPT"

_MOST_CONFIG_BYTES = 32 * 1024


@dataclass(frozen=True)
class Identity:
    """Identity of a recorder.

    Attributes:
        project: the project's name.
        run: the run's id.
        attempt: the attempt that this worker joins or claims.
        worker: the rank, from 0.
        world_size: number of workers of the attempt.
        node: the machine's name, as a part of a key.
        local_size: number of workers on this machine, as far as the launcher reports it.
        local_rank: the rank on this machine, from 0.
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
        """Approximate number of machines of the attempt."""
        return -(-self.world_size // max(1, self.local_size))

    def writer(self, suffix: str = "") -> WriterId:
        """Return the writer id of this worker's segments."""
        return WriterId(self.attempt, self.node, f"w{self.worker}{suffix}")


def new_run_id() -> str:
    """Return a new run id that sorts by time: ``20261120-211500-3fa9c1``, in UTC."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def new_nonce() -> str:
    """Return a new attempt id. The launcher creates it once and passes it to all ranks."""
    return f"a{secrets.token_hex(4)}"


def resolve(project: str | None, run: str | None) -> Identity:
    """Determine the identity of this recorder.

    Args:
        project: the project; by default ``WATCHSTEP_PROJECT``, or "default".
        run: the run's id; by default ``WATCHSTEP_RUN``, or a new id.

    Raises:
        BadNameError: a name is not valid in a key.
        ConfigError: there are several ranks, and nothing determines their common run and attempt.
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
    """Return this machine's name, with characters replaced that are not valid in a key."""
    name = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")
    return name[:64] or "node"


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r} is not a number", "unset it, or set a number"
        ) from None


_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables of torchrun and compatible launchers; Open MPI; MPICH and Intel MPI."""


def _local_size(default: int) -> int:
    name = next((name for name in _LOCAL_SIZES if os.environ.get(name)), "")
    return _number(name, default) if name else default


_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Variables of the same launchers, and Slurm."""


def _local_rank(default: int) -> int:
    name = next((name for name in _LOCAL_RANKS if os.environ.get(name)), "")
    return _number(name, default) if name else default


def _shared_nonce(world: int) -> str:
    """Return an id that all ranks of one launch derive independently; empty for a single rank, or with a launcher's id.

    Ranks on one machine share their parent. Ranks on several machines share only what the launcher sets.
    """
    if world == 1 or os.environ.get(ATTEMPT):
        return ""
    local = _number("LOCAL_WORLD_SIZE", world)
    if local != world:
        raise ConfigError(
            f"the attempt of {world} ranks on several machines is unknown",
            f"start them with 'watchstep run', or set {RUN} and {ATTEMPT} to the same values on every machine",
        )
    parent = os.getppid()
    started = ProcessIdentity.of(parent).start_ticks if Path("/proc").is_dir() else 0
    return f"p{parent}-{started}"


def run_document(
    identity: Identity, rules: tuple[dict[str, Any], ...], config: CaptureConfig
) -> documents.RunDocument:
    """Return the run's document, which its first attempt writes."""
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
    )


def attempt_document(identity: Identity, on_stop: OnStop, config: CaptureConfig) -> documents.AttemptDocument:
    """Return the attempt's document, which is the same for each worker."""
    return documents.AttemptDocument(
        attempt=identity.attempt,
        started_ns=time.time_ns(),
        world_size=identity.world_size,
        on_stop="callback" if callable(on_stop) or on_stop == "check" else on_stop,
        host=socket.gethostname(),
        config=_bounded(changes_of(config)),
        seeds=recorded_seeds(),
        environment=provenance(),
    )


def _bounded(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration, or none if the attempt's document would exceed the size that readers accept."""
    return config if len(json.dumps(config, indent=1)) <= _MOST_CONFIG_BYTES else {}
