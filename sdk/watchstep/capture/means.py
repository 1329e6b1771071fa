"""What every way to the store needs."""

from __future__ import annotations

from dataclasses import dataclass

from watchstep.capture.access import Access
from watchstep.capture.backlog import Backlog
from watchstep.capture.control_reader import ControlReader
from watchstep.capture.health import Health


@dataclass(frozen=True)
class Means:
    """The way to the store and the service, what waits for it, and where is told how it went."""

    access: Access
    backlog: Backlog
    control: ControlReader
    health: Health
