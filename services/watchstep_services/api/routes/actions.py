"""Actions of a run, which its events caused, with every attempt to execute them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.api.schemas.filters import Since, Until, Word, between, one_of
from watchstep_services.api.schemas.models import ActionList, ActionOutput, TryOutput
from watchstep_services.api.schemas.paging import ListOrder, Paged
from watchstep_services.core.redaction import shown_key
from watchstep_services.db.models import ActionRow, ActionTry

router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/actions", tags=["actions"])

Kinds = Annotated[
    list[Annotated[Word, Query(max_length=16)]] | None,
    Query(alias="kind", max_length=20, description="Only actions of these kinds.", examples=[["stop"]]),
]
ActionStates = Annotated[
    list[Literal["pending", "done", "skipped", "failed"]] | None,
    Query(alias="state", max_length=4, description="Only actions in one of these states."),
]


@router.get("", summary="List actions")
@permits("read")
def list_actions(
    project: str,
    run: str,
    service: Served,
    paging: Paged,
    kinds: Kinds = None,
    states: ActionStates = None,
    since: Since = None,
    until: Until = None,
) -> ActionList:
    """Return the actions that the run's events caused, oldest first, with every attempt to execute them."""
    chosen = [
        *one_of(ActionRow.kind, kinds),
        *one_of(ActionRow.state, states),
        *between(ActionRow.created_ns, since, until),
    ]
    with service.database.read() as session:
        row = find_run(session, project, run)
        rows, token = paging.fetch(
            session, ActionRow, [ActionRow.run_id == row.id, *chosen], ListOrder(ActionRow.id)
        )
        tries = _tries(session, [action.id for action in rows])
    return ActionList(actions=[_action(action, tries[action.id]) for action in rows], next_page_token=token)


@router.get("/{action}", summary="Get an action")
@permits("read")
def get_action(
    project: str, run: str, action: Annotated[int, Path(ge=1, lt=2**62)], service: Served
) -> ActionOutput:
    """Return an action with every attempt to execute it."""
    with service.database.read() as session:
        run_row = find_run(session, project, run)
        row = session.get(ActionRow, action)
        if row is None or row.run_id != run_row.id:
            raise NotFoundError(
                f"action {action} of run {project}/{run}: not found",
                "list the run's actions to get their ids",
            )
        return _action(row, _tries(session, [row.id])[row.id])


def _tries(session: Session, action_ids: Sequence[int]) -> dict[int, list[TryOutput]]:
    tries: dict[int, list[TryOutput]] = defaultdict(list)
    chosen = select(ActionTry).where(ActionTry.action_id.in_(action_ids)).order_by(ActionTry.number)
    for row in session.execute(chosen).scalars():
        output = TryOutput(number=row.number, at_ns=row.at_ns, outcome=row.outcome, detail=row.detail)
        tries[row.action_id].append(output)
    return tries


def _action(row: ActionRow, tries: list[TryOutput]) -> ActionOutput:
    columns = {name: getattr(row, name) for name in ActionOutput.model_fields if name != "tries"}
    return ActionOutput(**{**columns, "key": shown_key(row.key)}, tries=tries)
