"""The environment of a launched program: who records, where to, and the injected start-up code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from watchstep.capture.identity import ATTEMPT, PROJECT, RUN
from watchstep.capture.service.registration import LAUNCH
from watchstep.errors import ConfigError
from watchstep.format.layout import check_name
from watchstep.hook import STORE
from watchstep.hook_arguments import ON_STOP, PROBES
from watchstep.platform.transport import SERVICE, TOKEN, ServiceAddress
from watchstep.store.local import STORE_ID, StoreIdentity

INJECTED = Path(__file__).parent / "injected"
"""A folder whose ``sitecustomize`` waits for the program to import PyTorch."""

LAUNCHED = "WATCHSTEP_LAUNCHED"
"""The attempt that a launcher has made known to the service already; ``watchstep run`` takes it and registers nothing."""

RESTARTS = "WATCHSTEP_RESTARTS"
"""How often a cluster has started the same job again, set by its backend: the attempt's name ends in it."""


@dataclass(frozen=True)
class AttemptLaunch:
    """One attempt of one run, as its launcher settles it.

    Attributes:
        store_url: where runs lie.
        project: the project.
        run: the run's id.
        attempt: the nonce that all ranks of the attempt share.
        service: the service, if there is one.
        on_stop: what a cooperative stop does in the program.
        store_id: of a local store, as `watchstep.store.local.StoreIdentity` found it; empty where it is not known.
        probes: what its rules need to be measured besides.
        state: what the recorder has to do that the launch could not, as `watchstep.capture.service.registration.LaunchState` encodes it.
    """

    store_url: str
    project: str
    run: str
    attempt: str
    service: ServiceAddress | None = None
    on_stop: Literal["ignore", "raise", "stop", "checkpoint"] = "ignore"
    store_id: str = ""
    state: str = ""
    probes: tuple[str, ...] = ()


def environment(launch: AttemptLaunch, base: Mapping[str, str]) -> dict[str, str]:
    """The variables for a program that shall record itself, added to those it has.

    ``PYTHONPATH`` gets a folder in front whose ``sitecustomize`` runs, and then runs the one that it hides.
    """
    added = {STORE: launch.store_url, PROJECT: launch.project, RUN: launch.run, ATTEMPT: launch.attempt}
    added[ON_STOP] = launch.on_stop
    if launch.service is not None:
        added[SERVICE], added[TOKEN] = launch.service.url, launch.service.token
    added |= StoreIdentity(launch.store_id).variables(launch.store_url)
    if launch.probes:
        added[PROBES] = " ".join(dict.fromkeys([*base.get(PROBES, "").split(), *launch.probes]))
    if launch.state:
        added[LAUNCH] = launch.state
    own = {name: value for name, value in base.items() if name not in {LAUNCH, LAUNCHED, RESTARTS, STORE_ID}}
    paths = [str(INJECTED), *filter(None, base.get("PYTHONPATH", "").split(os.pathsep))]
    return {**own, **added, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def launched_attempt(variables: Mapping[str, str]) -> str:
    """The attempt that a launcher settled, with the number of its restart where there was one; empty without a launcher.

    Raises:
        BadNameError: it is no attempt's name.
        ConfigError: the number of restarts is none.
    """
    attempt, restarts = variables.get(LAUNCHED, ""), variables.get(RESTARTS, "") or "0"
    if not attempt:
        return ""
    if not (restarts.isascii() and restarts.isdecimal()):
        raise ConfigError(
            f"environment variable {RESTARTS}={restarts!r}: not a number", "unset it, or set a number"
        )
    return check_name("attempt", attempt if int(restarts) == 0 else f"{attempt}-r{int(restarts)}")
