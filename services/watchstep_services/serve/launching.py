"""Launch a program as a local job of the service, bound to its run so that it can be stopped."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from watchstep.capture.document.files import CAPTURE, inline
from watchstep.capture.identity import new_nonce
from watchstep.errors import ConfigError
from watchstep.platform.transport import ServiceAddress
from watchstep.wrapper import environment as injected
from watchstep_launch.backend import JobHandle, Launch
from watchstep_services.db.models import RunRow
from watchstep_services.runs.registration import bind_job, register
from watchstep_services.service.context import Service
from watchstep_services.tenancy import capture_document

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchedProgram:
    """A program to launch as a run.

    Attributes:
        project: project of the run.
        run: id of the run.
        command: program and arguments.
        folder: working directory.
        log: file for the output.
        on_stop: effect of a cooperative stop in the program.
        explain: whether a step with NaN or infinite gradients is computed again to name the source line, and ends the training.
    """

    project: str
    run: str
    command: tuple[str, ...]
    folder: Path
    log: Path
    on_stop: Literal["ignore", "raise"] = "raise"
    explain: bool = False


def launch_local(service: Service, program: LaunchedProgram, recorder_token: str) -> JobHandle:
    """Start a program as a separate process, and bind it to its run.

    Args:
        service: the service that watches the program.
        program: the program.
        recorder_token: token of the program for the service.

    Raises:
        ConfigError: the program cannot be started.
        BadNameError: the name of the project or the run is not valid.
    """
    run_id = register(service, program.project, program.run, (), "operator")
    launch = injected.AttemptLaunch(
        store_url=_store_url(service, run_id),
        project=program.project,
        run=program.run,
        attempt=new_nonce(),
        service=ServiceAddress(service.base_url, recorder_token),
        on_stop=program.on_stop,
        explain=program.explain,
        capture=_project_capture(service, program.project),
    )
    variables = injected.environment(launch, os.environ)
    backend = service.backends["local"]
    job = backend.submit(Launch(program.command, variables, program.folder, program.log))
    bind_job(service, run_id, launch.attempt, job, "operator")
    return job


def _store_url(service: Service, run_id: int) -> str:
    with service.database.read() as session:
        return session.get_one(RunRow, run_id).place.location


def _project_capture(service: Service, project: str) -> str:
    """The capture document of a project for a program; empty without one, or if this process's environment sets another."""
    if os.environ.get(CAPTURE):
        return ""
    with service.database.read() as session:
        document = capture_document(session, project)
    if document is None:
        return ""
    try:
        return inline(document, f"capture document of project {project}")
    except ConfigError as error:
        _log.warning("%s; the program records with the built-in configuration", error.what)
        return ""
