"""Launch a program as a local job of this service: recorded, bound to its run, and stoppable."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from watchstep.capture.identity import new_nonce
from watchstep.platform.transport import ServiceAddress
from watchstep.wrapper import environment as injected
from watchstep_launch.backend import JobHandle, Launch
from watchstep_services.runs.registration import bind_job, register
from watchstep_services.service.context import Service


@dataclass(frozen=True)
class LaunchedProgram:
    """A program to launch as a run.

    Attributes:
        project: the run's project.
        run: its id.
        command: program and arguments.
        folder: its working directory.
        log: file that takes its output.
        on_stop: what a cooperative stop does in it.
    """

    project: str
    run: str
    command: tuple[str, ...]
    folder: Path
    log: Path
    on_stop: Literal["ignore", "raise"] = "raise"


def launch_local(service: Service, program: LaunchedProgram, recorder_token: str) -> JobHandle:
    """Start a program as a process of its own, and bind it to its run.

    Args:
        service: the service that is to watch it.
        program: what to start.
        recorder_token: all that the program may do with the service.

    Raises:
        ConfigError: it cannot be started.
        BadNameError: project or run cannot be used.
    """
    run_id = register(service, program.project, program.run, (), "operator")
    launch = injected.AttemptLaunch(
        store_url=service.settings.store,
        project=program.project,
        run=program.run,
        attempt=new_nonce(),
        service=ServiceAddress(service.base_url, recorder_token),
        on_stop=program.on_stop,
    )
    variables = injected.environment(launch, os.environ)
    backend = service.backends["local"]
    job = backend.submit(Launch(program.command, variables, program.folder, program.log))
    bind_job(service, run_id, launch.attempt, job, "operator")
    return job
