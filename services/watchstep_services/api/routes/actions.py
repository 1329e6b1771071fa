"""Actions of a run: what its events caused, and every try of it."""

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
    Query(alias="kind", max_length=20, description="Only of these kinds.", examples=[["stop"]]),
]
ActionStates = Annotated[
    list[Literal["pending", "done", "skipped", "failed"]] | None,
    Query(alias="state", max_length=4, description="Only in one of these states."),
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
    """What the run's events caused, in the order in which it came, and every try of it."""
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


@router.get("/{action}", summary="Look at an action")
@permits("read")
def get_action(
    project: str, run: str, action: Annotated[int, Path(ge=1, lt=2**62)], service: Served
) -> ActionOutput:
    """One action, and every try of it."""
    with service.database.read() as session:
        row = find_run(session, project, run)
        held = session.get(ActionRow, action)
        if held is None or held.run_id != row.id:
            raise NotFoundError(f"action {action}: not one of run {project}/{run}", "list the run's actions")
        return _action(held, _tries(session, [held.id])[held.id])


def _tries(session: Session, action_ids: Sequence[int]) -> dict[int, list[TryOutput]]:
    tries: dict[int, list[TryOutput]] = defaultdict(list)
    chosen = select(ActionTry).where(ActionTry.action_id.in_(action_ids)).order_by(ActionTry.number)
    for made in session.execute(chosen).scalars():
        told = TryOutput(number=made.number, at_ns=made.at_ns, outcome=made.outcome, detail=made.detail)
        tries[made.action_id].append(told)
    return tries


def _action(row: ActionRow, tries: list[TryOutput]) -> ActionOutput:
    held = {name: getattr(row, name) for name in ActionOutput.model_fields if name != "tries"}
    return ActionOutput(**{**held, "key": shown_key(row.key)}, tries=tries)
