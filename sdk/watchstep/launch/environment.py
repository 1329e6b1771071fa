"""The environment of a launched program: who records, where to, and the injected start-up code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from watchstep.capture.identity import ATTEMPT, PROJECT, RUN
from watchstep.capture.service_client import SERVICE, TOKEN, ServiceAddress
from watchstep.hook import ON_STOP, STORE

INJECTED = Path(__file__).parent / "injected"
"""A folder whose ``sitecustomize`` waits for the program to import PyTorch."""


@dataclass(frozen=True)
class Launch:
    """One attempt of one run, as its launcher settles it.

    Attributes:
        store_url: where runs lie.
        project: the project.
        run: the run's id.
        attempt: the nonce that all ranks of the attempt share.
        service: the service, if there is one.
        on_stop: what a cooperative stop does in the program.
    """

    store_url: str
    project: str
    run: str
    attempt: str
    service: ServiceAddress | None = None
    on_stop: Literal["ignore", "raise"] = "ignore"


def environment(launch: Launch, base: Mapping[str, str]) -> dict[str, str]:
    """The variables for a program that shall record itself, added to those it has.

    ``PYTHONPATH`` gets a folder in front whose ``sitecustomize`` runs, and then runs the one that it hides.
    """
    added = {STORE: launch.store_url, PROJECT: launch.project, RUN: launch.run, ATTEMPT: launch.attempt}
    added[ON_STOP] = launch.on_stop
    if launch.service is not None:
        added[SERVICE], added[TOKEN] = launch.service.url, launch.service.token
    paths = [str(INJECTED), *filter(None, base.get("PYTHONPATH", "").split(os.pathsep))]
    return {**base, **added, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
