"""References of an attempt: other runs that its rules compare with, pinned when its first rows are evaluated."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import select

from watchstep.errors import FormatError, StoreError
from watchstep.store.store import Store
from watchstep_rules.references import compared_by, pin_references, read_references, with_references
from watchstep_services.db.models import RunRow
from watchstep_services.service.context import Service
from watchstep_services.service.judging import Loaded

_log = logging.getLogger(__name__)


def with_references_of(
    service: Service, run_store: Store, project: str, attempt: str, configs: Sequence[Loaded], *, pin: bool
) -> list[Loaded]:
    """Add the statistics of reference runs to the rule configs that compare with them; a config that has them is unchanged.

    Args:
        service: the service.
        run_store: the store of the run.
        project: its project.
        attempt: the attempt.
        configs: the rule configs of the run.
        pin: whether to pin the references first, because the attempt begins. If the store is read-only, rules are evaluated
            without references, which they report in their health.

    Raises:
        StoreError: the store did not answer.
    """
    compared = [
        entry for loaded in configs if loaded.config is not None and (entry := compared_by(loaded.config))
    ]
    if not compared:
        return list(configs)
    if pin:
        _pin(service, run_store, project, attempt, configs, [entry.run for entry in compared])
    try:
        references = read_references(run_store, attempt)
    except FormatError as error:
        _log.warning("project %s: an attempt is evaluated without reference runs: %s", project, error.what)
        references = None
    return [
        loaded
        if loaded.config is None
        else replace(loaded, config=with_references([loaded.config], references)[0])
        for loaded in configs
    ]


def _pin(
    service: Service,
    run_store: Store,
    project: str,
    attempt: str,
    configs: Sequence[Loaded],
    runs: Sequence[str],
) -> None:
    with service.database.read() as session:
        rows = session.execute(
            select(RunRow.run, RunRow.attempt).where(
                RunRow.project == project, RunRow.run.in_(runs), RunRow.attempt != ""
            )
        ).all()
    readable = [loaded.config for loaded in configs if loaded.config is not None]
    try:
        pin_references(run_store, attempt, readable, {str(row.run): str(row.attempt) for row in rows})
    except StoreError as error:
        _log.warning("project %s: an attempt is evaluated without reference runs: %s", project, error.what)
