"""Whether an alert that fires stops the job: where its rule may; else what would have happened is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.orm import Session

from watchstep_rules.config.rule_config import RuleConfig, StopAction
from watchstep_services.database.records import add_event
from watchstep_services.dispatcher.audit import Subject, note
from watchstep_services.dispatcher.grants import digest_of, judges, word_for
from watchstep_services.dispatcher.grouping.silences import Active
from watchstep_services.dispatcher.request import Asked, request_stop
from watchstep_services.evaluator.judging import Judged
from watchstep_services.evaluator.place import Place
from watchstep_services.events import CloudEvent, make_event

Why = Literal["dry_run", "not_allowed", "silenced"]


@dataclass(frozen=True)
class Cause:
    """What asks for a stop: the event of an alert that fires, in words, and the silence that covers the alert."""

    event: CloudEvent
    reason: str
    silence: Active | None


def wants_stop(config: RuleConfig) -> bool:
    """Whether a rule config says ``stop``, tried dry or not."""
    return any(isinstance(action, StopAction) for action in config.actions)


def stop(session: Session, place: Place, judged: Judged, cause: Cause) -> int | None:
    """Ask for the stop, or record that it would have been asked for.

    Returns:
        The id of the action; None where there is none, or the attempt has been asked to stop already.
    """
    assert judged.config is not None
    told = _told(judged.config, cause)
    if judged.config.dry_run:
        _would_have(session, place, cause, "dry_run", told)
        return None
    word = word_for(session, place.project, judged.row, judged.config)
    if word is None:
        _would_have(session, place, cause, "not_allowed", told)
        return None
    if cause.silence is not None and cause.silence.holds_stop:
        _would_have(session, place, cause, "silenced", {**told, "silence": cause.silence.id})
        return None
    asked = Asked(f"rule {judged.config.name}", {**told, "allowed": word.as_data()})
    because = (cause.event.id, cause.reason)
    return request_stop(session, place.base_url, place.run_id, place.attempt, because, asked)


def _told(config: RuleConfig, cause: Cause) -> dict[str, Any]:
    data = cause.event.data
    return {
        "event": cause.event.id,
        "reason": cause.reason,
        "step": data["step"],
        "digest": digest_of(config),
        "judges": judges(config),
        "rule_config": data["rule_config"],
        "finding": data["finding"],
        "evidence": data["evidence"],
    }


def _would_have(session: Session, place: Place, cause: Cause, why: Why, told: dict[str, Any]) -> None:
    data = {
        "attempt": place.attempt,
        "because": why,
        "cause": cause.event.id,
        "mend": _mend(place, why, told),
        **{name: told[name] for name in ("reason", "step", "digest", "rule_config", "finding", "evidence")},
    }
    event = make_event("watchstep.stop.would_have", place.base_url, place.named, place.now_ns, data)
    add_event(session, place.run_id, event, place.now_ns)
    subject = Subject(place.project, place.run, place.attempt)
    name = told["judges"]["name"]
    note(session, "would_have", subject, f"rule {name}", place.now_ns, {"because": why, **told})


def _mend(place: Place, why: Why, told: dict[str, Any]) -> str:
    name = told["judges"]["name"]
    if why == "dry_run":
        return f"leave 'dry_run' out of rule {name!r} to let it stop"
    if why == "silenced":
        return f"silence {told['silence']} holds stops back; expire it to let rule {name!r} stop"
    return (
        f"rule {name!r} has never been allowed to stop jobs of project {place.project!r}: watchstep rules allow-stop "
        f"{name} --project {place.project} --reason WHY"
    )
