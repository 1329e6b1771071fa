"""Which figures this rank samples: its own, and the machine's where it is the first on it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from watchstep.capture.health import Health
from watchstep.capture.identity import Identity
from watchstep.capture.system.data_workers import DataWorkers
from watchstep.capture.system.gpus import Gpus, driver_is_there, visible_count
from watchstep.capture.system.node_cpu import NodeCpu
from watchstep.capture.system.node_disks import NodeDisks
from watchstep.capture.system.node_memory import NodeMemory
from watchstep.capture.system.node_network import NodeNetwork
from watchstep.capture.system.process import Process
from watchstep.capture.system.source import Source

_OF_PROCESS: tuple[Callable[[], Source], ...] = (Process, DataWorkers)
_OF_NODE: tuple[Callable[[], Source], ...] = (NodeCpu, NodeMemory, NodeDisks, NodeNetwork)


def opened(identity: Identity, health: Health, *, gpus: bool) -> list[Source]:
    """What can be sampled here; health is told of the rest.

    Args:
        identity: of this rank.
        health: gets a note for each kind of figures that cannot be had.
        gpus: whether GPUs are wanted.
    """
    kinds = list(_OF_PROCESS)
    if identity.local_rank == 0:
        kinds += _OF_NODE
    if sys.platform != "linux":
        health.note(
            "system", f"processor, memory and disks are not sampled on {sys.platform}: it has no /proc"
        )
        kinds = []
    if gpus and driver_is_there() and _samples_gpus(identity):
        kinds.append(Gpus)
    found = []
    for kind in kinds:
        try:
            found.append(kind())
        except (OSError, ValueError, LookupError) as error:
            health.note(f"system: {kind.__name__}", f"not sampled: {type(error).__name__}: {error}"[:300])
        except ImportError:
            health.note("system: Gpus", "not sampled: install watchstep[gpu]")
    return found


def _samples_gpus(identity: Identity) -> bool:
    """Whether they are this rank's to sample: each rank's own where it is shown fewer than there are ranks."""
    shown = visible_count()
    return identity.local_rank == 0 or (shown is not None and shown < identity.local_size)
