"""What a hook tells of its run and attempt before anything is recorded."""

from __future__ import annotations

import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

from watchstep import documents
from watchstep.capture.config import CaptureConfig
from watchstep.capture.identity import Identity
from watchstep.stopping import OnStop


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
