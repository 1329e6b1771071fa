"""A backtest that a service does, where the runs are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from watchstep.errors import ConfigError, ServiceError
from watchstep_rules.backtest.many import Failed, Replayed
from watchstep_rules.backtest.report import read_report
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.cli.calling import call, service_of

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 3.0


def backtest_by_service(
    service: str, store: str, runs: Sequence[str], configs: Sequence[RuleConfig], sweeps: Sequence[str]
) -> Iterator[Replayed | Failed]:
    """Have a service judge runs; results come when all of a project are done.

    Args:
        service: its URL.
        store: for the service of a store on this machine, where no URL is given.
        runs: ``<project>/<run>``; the run may be a pattern.
        configs: the rules.
        sweeps: as of the command line.

    Raises:
        ConfigError: a run is not named with its project.
        ServiceError, NotFoundError: the service does not answer, refuses, or knows no such run.
    """
    url, token = service_of(store, service)
    rules = [config.as_data() for config in configs]
    for project, names in _by_project(runs).items():
        place = f"{url}/v1/projects/{project}/backtests"
        asked = call("POST", place, token, {"runs": names, "rules": rules, "sweep": list(sweeps)})
        yield from _results(f"{place}/{asked['id']}", token, asked)


def _by_project(runs: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for run in runs:
        project, slash, name = run.partition("/")
        if not slash or "/" in name or "*" in project:
            raise ConfigError(
                f"run {run!r}: no run of a service", "name it <project>/<run>; the run may hold *"
            )
        found.setdefault(project, []).append(name or "*")
    return found


def _results(place: str, token: str, held: dict[str, Any]) -> list[Replayed | Failed]:
    pause = _FIRST_PAUSE
    while held["report"] is None:
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE, 1.5 * pause)
        held = call("GET", place, token)
    try:
        return read_report(held["report"])[0]
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(
            f"{place}: its report cannot be read ({error})", "use the same version as the service"
        ) from error
