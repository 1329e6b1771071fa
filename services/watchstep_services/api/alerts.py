"""Alerts and actions of a run."""

from __future__ import annotations

from collections import defaultdict

from fastapi import APIRouter
from sqlalchemy import select

from watchstep_services.api.access import Served, permits
from watchstep_services.api.lookup import find_run
from watchstep_services.api.models import ActionList, ActionOutput, AlertList, AlertOutput, TryOutput
from watchstep_services.database.models import Action, ActionTry, Alert

router = APIRouter(prefix="/v1/projects/{project}/runs/{run}", tags=["alerts"])


@router.get("/alerts", summary="List alerts")
@permits("read")
def list_alerts(project: str, run: str, service: Served) -> AlertList:
    """Alerts of a run, the last changed first."""
    with service.database.read() as session:
        row = find_run(session, project, run)
        alerts = session.execute(
            select(Alert).filter_by(run_id=row.id).order_by(Alert.since_ns.desc(), Alert.id)
        ).scalars()
        return AlertList(
            alerts=[
                AlertOutput.model_validate({name: getattr(alert, name) for name in AlertOutput.model_fields})
                for alert in alerts
            ]
        )


@router.get("/actions", summary="List actions")
@permits("read")
def list_actions(project: str, run: str, service: Served) -> ActionList:
    """What the run's events caused, and every try of it."""
    with service.database.read() as session:
        row = find_run(session, project, run)
        tries: dict[int, list[TryOutput]] = defaultdict(list)
        for made in session.execute(
            select(ActionTry)
            .join(Action, Action.id == ActionTry.action_id)
            .where(Action.run_id == row.id)
            .order_by(ActionTry.number)
        ).scalars():
            tries[made.action_id].append(
                TryOutput(number=made.number, at_ns=made.at_ns, outcome=made.outcome, detail=made.detail)
            )
        actions = session.execute(select(Action).filter_by(run_id=row.id).order_by(Action.id)).scalars()
        return ActionList(
            actions=[
                ActionOutput(
                    key=action.key,
                    kind=action.kind,
                    event_id=action.event_id,
                    state=action.state,
                    stage=action.stage,
                    outcome=action.outcome,
                    created_ns=action.created_ns,
                    finished_ns=action.finished_ns,
                    tries=tries[action.id],
                )
                for action in actions
            ]
        )
