"""Backtests: judge runs that are there already, by rules that are not in force."""

from __future__ import annotations

from fastapi import APIRouter

from watchstep_rules.backtest.report import report
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.middleware.work_slots import Working
from watchstep_services.api.schemas.models import BacktestInput, BacktestOutput
from watchstep_services.api.schemas.problems import documented
from watchstep_services.evaluation.backtests import read_progress, request_backtest
from watchstep_services.service.context import Service

backtests_router = APIRouter(prefix="/v1/projects/{project}/backtests", tags=["backtests"])


@backtests_router.post(
    "", summary="Ask for a backtest", status_code=202, dependencies=[Once], responses=documented(409)
)
@permits("operate")
def post_backtest(project: str, body: BacktestInput, service: Served, slots: Working) -> BacktestOutput:
    """Judge runs of the project. Nothing is stopped or told; what was found is read by the number that is given."""
    rules = slots.checked_rules(project, body.rules) if body.rules else DEFAULT_RULES
    number = request_backtest(service, project, body.runs, rules, body.sweep)
    return _read(service, project, number)


@backtests_router.get("/{number}", summary="Look at a backtest")
@permits("operate")
def get_backtest(project: str, number: int, service: Served) -> BacktestOutput:
    """How far it came, and, once it is done, what it found."""
    return _read(service, project, number)


def _read(service: Service, project: str, number: int) -> BacktestOutput:
    held = read_progress(service, project, number)
    return BacktestOutput(
        id=held.id,
        state=held.state,
        runs=len(held.runs),
        judged=len(held.results),
        report=report(held.results, held.variations) if held.state == "done" else None,
    )
