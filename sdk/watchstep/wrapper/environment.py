"""The environment of a launched program: identity, store, and the injected start-up code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from watchstep.capture.document.files import CAPTURE
from watchstep.capture.identity import ATTEMPT, PROJECT, RUN
from watchstep.capture.mirror.settings import MIRROR
from watchstep.capture.service.registration import LAUNCH
from watchstep.errors import ConfigError
from watchstep.format.capture_needs import CaptureNeed, encoded
from watchstep.format.layout import check_name
from watchstep.hook import STORE
from watchstep.hook_arguments import EXPLAIN, NEEDS, ON_NONFINITE, ON_STOP, TRACE, needs_in
from watchstep.platform.transport import SERVICE, TOKEN, ServiceAddress
from watchstep.store.local import STORE_ID, StoreIdentity

INJECTED = Path(__file__).parent / "injected"
"""Folder with a ``sitecustomize`` that waits for the program to import PyTorch."""

LAUNCHED = "WATCHSTEP_LAUNCHED"
"""The attempt that a launcher has registered with the service; ``watchstep run`` uses it and registers nothing."""

RESTARTS = "WATCHSTEP_RESTARTS"
"""How often a cluster has restarted the job, set by its backend: a suffix of the attempt's name."""


@dataclass(frozen=True)
class AttemptLaunch:
    """One attempt of one run, as its launcher defines it.

    Attributes:
        store_url: URL of the store.
        project: the project.
        run: the run's id.
        attempt: the id that all ranks of the attempt share.
        service: the service, if there is one.
        on_stop: effect of a cooperative stop in the program.
        on_nonfinite: the gate policy, as `watchstep.stopping.OnNonfinite.parse` reads it.
        explain: whether the step that stops the training by the gate policy is computed again.
        trace: steps to trace, as `watchstep.trace.trace_steps.trace_steps_of` reads them; empty for those of the existing variable.
        store_id: id of a local store, as in `watchstep.store.local.StoreIdentity`; empty if unknown.
        needs: what the rules need the recorder to capture.
        state: what the launch leaves to the recorder, encoded by `watchstep.capture.service.registration.LaunchState`.
        capture: what to record, as one line of JSON (`watchstep.capture.document.files.inline`); empty for the built-in configuration.
        mirror: tools to mirror into, as `watchstep.capture.mirror.settings.mirror_of` reads them; empty for those of the existing variables.
    """

    store_url: str
    project: str
    run: str
    attempt: str
    service: ServiceAddress | None = None
    on_stop: Literal["ignore", "raise", "stop", "checkpoint"] = "ignore"
    on_nonfinite: str = "record"
    explain: bool = False
    trace: str = ""
    store_id: str = ""
    state: str = ""
    needs: tuple[CaptureNeed, ...] = ()
    capture: str = ""
    mirror: str = ""


def environment(launch: AttemptLaunch, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a program that records itself, added to the existing ones.

    ``PYTHONPATH`` is prefixed with a folder whose ``sitecustomize`` runs first, and then runs the one that it hides.
    """
    added = {STORE: launch.store_url, PROJECT: launch.project, RUN: launch.run, ATTEMPT: launch.attempt}
    added[ON_STOP] = launch.on_stop
    added[ON_NONFINITE] = launch.on_nonfinite
    if launch.explain:
        added[EXPLAIN] = "1"
    if launch.trace:
        added[TRACE] = launch.trace
    if launch.service is not None:
        added[SERVICE], added[TOKEN] = launch.service.url, launch.service.token
    added |= StoreIdentity(launch.store_id).variables(launch.store_url)
    if launch.needs:
        added[NEEDS] = encoded((*needs_in(base), *launch.needs))
    if launch.state:
        added[LAUNCH] = launch.state
    if launch.capture:
        added[CAPTURE] = launch.capture
    if launch.mirror:
        added[MIRROR] = launch.mirror
    own = {name: value for name, value in base.items() if name not in {LAUNCH, LAUNCHED, RESTARTS, STORE_ID}}
    paths = [str(INJECTED), *filter(None, base.get("PYTHONPATH", "").split(os.pathsep))]
    return {**own, **added, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def launched_attempt(variables: Mapping[str, str]) -> str:
    """Return the attempt that a launcher defined, with the number of its restart if there is one; empty without a launcher.

    Raises:
        BadNameError: the attempt's name is invalid.
        ConfigError: the number of restarts is invalid.
    """
    attempt, restarts = variables.get(LAUNCHED, ""), variables.get(RESTARTS, "") or "0"
    if not attempt:
        return ""
    if not (restarts.isascii() and restarts.isdecimal()):
        raise ConfigError(
            f"environment variable {RESTARTS}={restarts!r} is not a number", "unset it, or set a number"
        )
    return check_name("attempt", attempt if int(restarts) == 0 else f"{attempt}-r{int(restarts)}")


def find_program(command: str, program: str) -> str:
    """Return the path of a program to start.

    Args:
        command: the command that starts it, for the error.
        program: as given to the command.

    Raises:
        ConfigError: it cannot be found, or is a script without the right to be executed.
    """
    found = shutil.which(program)
    if found is None:
        is_script = program.endswith(".py") and Path(program).is_file()
        hint = f"run it by its interpreter: python {program}" if is_script else "check its name and PATH"
        raise ConfigError(f"{command}: program {program!r} not found", hint)
    return found
