"""The table of a project's runs: filters, order and pages in the database, and the tags of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, UnaryExpression, delete, func, or_, select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError
from watchstep.format.layout import check_name
from watchstep_services.api.queries.run_facts import facts_of
from watchstep_services.api.schemas.filters import between, one_of
from watchstep_services.api.schemas.run_pages import RunTable
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import AlertInstanceRow, AlertRow, RunRow, RunTag
from watchstep_services.db.models.runs import TAG_LENGTH

Sort = Literal["created", "name", "state", "step", "ended", "seen", "firing"]
Order = Literal["ascending", "descending"]

MAX_TAGS = 20
_MAX_LISTED_TAGS = 200


@dataclass(frozen=True)
class RunFilter:
    """Which runs of a project are listed.

    Attributes:
        project: the project.
        search: text that the run's name or a tag contains, in any case; empty: all runs.
        states: states of the run.
        phases: phases of which the run has an alert.
        rules: rules of which one fires.
        tags: tags that the run has.
        since: earliest registration.
        until: end of the registrations.
    """

    project: str
    search: str
    states: Sequence[str]
    phases: Sequence[str]
    rules: Sequence[str]
    tags: Sequence[str]
    since: str | None
    until: str | None

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the conditions in SQL.

        Raises:
            ConfigError: a time or the name of the project is not valid.
        """
        conditions = [
            RunRow.project == check_name("project", self.project),
            *one_of(RunRow.state, self.states),
            *between(RunRow.created_ns, self.since, self.until),
        ]
        if self.search:
            tagged = select(RunTag.run_id).where(RunTag.tag.icontains(self.search, autoescape=True))
            conditions.append(or_(RunRow.run.icontains(self.search, autoescape=True), RunRow.id.in_(tagged)))
        instances = select(AlertInstanceRow.run_id)
        over_attempts = [phase for phase in self.phases if phase != "pending"]
        of_phases: list[ColumnElement[bool]] = [
            RunRow.id.in_(instances.where(AlertInstanceRow.phase.in_(over_attempts)))
        ]
        if "pending" in self.phases:
            pending = select(AlertRow.id).where(
                AlertRow.run_id == RunRow.id, AlertRow.attempt == RunRow.attempt, AlertRow.phase == "pending"
            )
            of_phases.append(pending.exists())
        if self.phases:
            conditions.append(or_(*of_phases))
        if self.rules:
            fires = AlertInstanceRow.phase == "firing"
            conditions.append(RunRow.id.in_(instances.where(fires, AlertInstanceRow.rule.in_(self.rules))))
        conditions += [RunRow.id.in_(select(RunTag.run_id).where(RunTag.tag == tag)) for tag in self.tags]
        return conditions


@dataclass(frozen=True)
class RunPage:
    """The part of the table that is shown.

    Attributes:
        sort: what it is sorted by.
        order: direction; runs that are equal follow by registration, newest first.
        offset: number of runs before the page.
        limit: maximum number of runs.
    """

    sort: Sort
    order: Order
    offset: int
    limit: int

    def orders(self) -> tuple[UnaryExpression[Any], ...]:
        """Return the order in SQL."""
        firing = (
            select(func.count())
            .where(AlertInstanceRow.run_id == RunRow.id, AlertInstanceRow.phase == "firing")
            .scalar_subquery()
        )
        columns: dict[Sort, ColumnElement[Any]] = {
            "created": RunRow.id.expression,
            "name": RunRow.run.expression,
            "state": RunRow.state.expression,
            "step": RunRow.last_step.expression,
            "ended": func.coalesce(RunRow.ended_ns, 0),
            "seen": RunRow.last_seen_ns.expression,
            "firing": firing,
        }
        column = columns[self.sort]
        return (column.desc() if self.order == "descending" else column.asc(), RunRow.id.desc())


def read_table(session: Session, base_url: str, runs: RunFilter, page: RunPage) -> RunTable:
    """Read a page of the table.

    Raises:
        ConfigError: a filter is not valid.
    """
    conditions = runs.conditions()
    total = session.execute(select(func.count()).select_from(RunRow).where(*conditions)).scalar_one()
    chosen = select(RunRow).where(*conditions).order_by(*page.orders()).offset(page.offset).limit(page.limit)
    rows = list(session.execute(chosen).scalars())
    of_project = select(RunRow.id).where(RunRow.project == runs.project)
    tags = (
        select(RunTag.tag)
        .where(RunTag.run_id.in_(of_project))
        .distinct()
        .order_by(RunTag.tag)
        .limit(_MAX_LISTED_TAGS)
    )
    return RunTable(
        runs=facts_of(session, base_url, rows),
        total=total,
        offset=page.offset,
        tags=list(session.execute(tags).scalars()),
    )


def put_tags(session: Session, run: RunRow, tags: Sequence[str], who: str) -> list[str]:
    """Replace the tags of a run; return them in order.

    Raises:
        ConfigError: there are too many, or one is not valid.
    """
    chosen = sorted({tag.strip() for tag in tags})
    if len(chosen) > MAX_TAGS:
        raise ConfigError(f"{len(chosen)} tags: more than the limit of {MAX_TAGS}", "remove some of them")
    for tag in chosen:
        if not tag or len(tag) > TAG_LENGTH or not tag.isprintable():
            raise ConfigError(f"tag {tag[:80]!r}: not valid", f"use 1 to {TAG_LENGTH} printable characters")
    current = set(session.execute(select(RunTag.tag).filter_by(run_id=run.id)).scalars())
    session.execute(delete(RunTag).where(RunTag.run_id == run.id, RunTag.tag.not_in(chosen)))
    now = read_clock(session)
    for tag in chosen:
        if tag not in current:
            session.add(RunTag(run_id=run.id, tag=tag, added_ns=now, added_by=who))
    return chosen
