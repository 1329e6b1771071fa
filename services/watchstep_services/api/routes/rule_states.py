"""How the rule configs of a run stand."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep_rules.custom.python.rule import Python
from watchstep_services.api.routes.rule_configs import shown_config
from watchstep_services.api.schemas.models import OverriddenRule, RuleState
from watchstep_services.auth.roles import AuthenticatedCaller
from watchstep_services.db.models import RuleConfigRow, RuleStateRow, RunRow
from watchstep_services.notify.directory import known_receivers
from watchstep_services.runs.grants import word_for
from watchstep_services.runs.rule_configs import OVERRIDDEN, STRONGER_THAN_RECORDERS
from watchstep_services.service.context import Service
from watchstep_services.service.judging import load_config, memory_of


def rules_of(service: Service, session: Session, run: RunRow, caller: AuthenticatedCaller) -> list[RuleState]:
    """The rule configs that judge a run, in the order in which they came, as they stand on its newest attempt."""
    rows = session.execute(
        select(RuleConfigRow, RuleStateRow)
        .outerjoin(
            RuleStateRow, (RuleStateRow.config_id == RuleConfigRow.id) & (RuleStateRow.attempt == run.attempt)
        )
        .where(RuleConfigRow.run_id == run.id, ~RuleConfigRow.origin.startswith("retired"))
        .order_by(RuleConfigRow.id)
    ).all()
    overridden = {
        row.name: OverriddenRule(origin="recorder", rule=row.rule, config=shown_config(row.data, caller))
        for row in session.execute(
            select(RuleConfigRow).filter_by(run_id=run.id, origin=OVERRIDDEN)
        ).scalars()
    }
    known = known_receivers(service, session, run.project)
    states = []
    for config, held in rows:
        asked = load_config(config, None).config
        memory = memory_of(None if held is None else held.memory)
        states.append(
            RuleState(
                name=config.name,
                rule=config.rule,
                origin=config.origin,
                granted_stop=asked is not None and word_for(session, run.project, config, asked) is not None,
                health=memory.health.value,
                problem=memory.problem,
                warnings=[] if asked is None else service.unknown_receivers(asked, known),
                judged=memory.judged,
                findings=0 if held is None else held.findings,
                phase=memory.alert.phase.value,
                isolation=(memory.state or {}).get("isolation") if config.rule == Python.name else None,
                overrides=[overridden[config.name]]
                if config.name in overridden and config.origin in STRONGER_THAN_RECORDERS
                else [],
                config=shown_config(config.data, caller),
            )
        )
    return states
