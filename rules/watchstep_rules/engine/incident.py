"""Incidents: alerts of one attempt that begin close together, and the likeliest cause among them.

A fault seldom fires only one rule. A learning rate that is multiplied by 100 fires `hyperparameter_jump`, then `exploding_gradient`,
then `loss_spike`, and finally `nan_or_inf`: four alerts, one incident.

**Which alerts form an incident.** The *onset* of an alert is the first step of the findings that made it fire. Onsets are processed by
step. An onset at most `NEAR_STEPS` after the incident was last extended belongs to it; any other begins the next incident. An alert
extends an incident once, so an alert that fires repeatedly does not make an incident endless. Incidents are a function of the set of
onsets: neither the order in which onsets become known nor the boundaries of segments change them.

**What the cause is.** The likeliest cause is the earliest onset: what begins later cannot have caused it. Among onsets at the same step it is
the one furthest upstream: settings before data, data before layers, layers before gradients, gradients before losses, losses before
values that are not finite; then the first tensor in the order of data flow. There is one exception. A rule about a lasting setting, e.g.
parameters that are in no optimizer, needs some steps to detect it, and the setting was there before. If its onset is at most
`DETECTION_STEPS` after the first, it is the cause.

The explanation of an alert: what was measured, where, against which threshold, since when, usual causes, and remedies.

The first four are figures of the run. The last two are general knowledge about the rule, and are presented as such.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from watchstep.platform.terminal_text import number_text
from watchstep_rules.config import rule_config
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition
from watchstep_rules.rule import Finding

NEAR_STEPS = 50
DETECTION_STEPS = 10
ID_LENGTH = 16

_STAGES: tuple[tuple[str, ...], ...] = (
    (
        "resume_mismatch",
        "hyperparameter_jump",
        "learning_rate_scale",
        "missing_zero_grad",
        "recompute_mismatch",
        "optimizer_not_stepping",
        "absent_from_optimizer",
        "invalid_objective",
        "poor_initialization",
        "symmetric_units",
        "frozen_batch_norm",
        "running_statistics_frozen",
    ),
    ("input_image_mean", "class_imbalance", "batch_size", "token_ratio", "replica_divergence"),
    (
        "saturated_activation",
        "dead_relu",
        "representation_collapse",
        "all_zero",
        "unchanged_tensor",
        "tensor_variance",
        "exploding_tensor",
    ),
    (
        "exploding_gradient",
        "gradient_norm_spike",
        "vanishing_gradient",
        "gradients_cease",
        "starved_expert",
        "weight_not_updating",
        "weight_update_ratio",
    ),
    (
        "loss_spike",
        "lost_progress",
        "validation_loss_jump",
        "oscillating_loss",
        "loss_not_decreasing",
        "slow_convergence",
        "overfit",
        "overtraining",
        "unlike_earlier_runs",
        "similar_across_runs",
    ),
    ("scaler_skips", "skipped_updates", "non_finite_values", "training_stopped", "nan_or_inf"),
)
"""Rules by stage, in the order in which faults spread, the most upstream first."""

_STAGE = {rule: stage for stage, rules in enumerate(_STAGES) for rule in rules}
_SETTINGS, _DATA, _GRADIENTS, _NUMBERS, _OF_RUN = 0, 1, 3, len(_STAGES) - 1, len(_STAGES)

_EXACT = frozenset({"hyperparameter_jump"})
"""Rules about settings whose onset is exactly the step of the change."""

_OTHER_CAUSES = (
    "hyperparameter_jump",
    "replica_divergence",
    "exploding_gradient",
    "loss_spike",
    "lost_progress",
    "nan_or_inf",
)
"""Rules about usual causes, in the order of data flow. That one of them has not fired is reported; what the data contain does not follow."""


class Onset(BaseModel):
    """The onset of an alert.

    Attributes:
        config: number of the rule config.
        name: name of the rule config.
        rule: the rule.
        severity: the severity.
        step: the first step of the findings that made the alert fire.
        finding: the finding that the alert names as the cause.
        check: the first remedy that the rule suggests.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    config: int
    name: str
    rule: str
    severity: str
    step: int
    finding: Finding
    check: str = ""


@dataclass(frozen=True)
class OnsetChanges:
    """Changes of the onsets of one alert: new onsets with their transitions, and onsets that no longer apply."""

    added: dict[int, Transition] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)


class IncidentSummary(BaseModel):
    """The summary of an incident.

    Attributes:
        id: derived from the attempt and the first onset. An earlier onset that becomes known later changes it.
        first_step: the first onset.
        last_step: the last onset.
        alerts: names of the rule configs with alerts in the incident, the likeliest cause first.
        cause: the rule config with the likeliest cause.
        message: the finding's message of the cause.
        check_first: what to check first; empty if the rule gives no advice.
        not_fired: rules about other causes that were evaluated and have not fired, with the number of their steps, as of the evaluation that
            last changed the incident.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    first_step: int
    last_step: int
    alerts: tuple[str, ...]
    cause: str
    message: str
    check_first: str = ""
    not_fired: tuple[str, ...] = ()

    def as_lines(self) -> list[str]:
        """Lines for a message or a terminal."""
        steps = f"step {self.first_step}"
        if self.last_step > self.first_step:
            steps = f"steps {self.first_step} to {self.last_step}"
        lines = [
            f"incident {self.id}, {steps}: {', '.join(self.alerts)}",
            f"  cause   likeliest {self.cause}: {self.message}",
        ]
        if self.check_first:
            lines.append(f"  check   {self.check_first}")
        if self.not_fired:
            lines.append(f"  quiet   evaluated, did not fire: {', '.join(self.not_fired)}")
        return lines


def onset_changes(transitions: Iterable[Transition], begun: int | None) -> OnsetChanges:
    """Changes of an alert's onsets through its transitions; a revision moves the onset of the current episode.

    Args:
        transitions: transitions of the alert, in order.
        begun: the onset of the current episode before these transitions; None if there is none.
    """
    changes = OnsetChanges()
    for change in transitions:
        if change.phase is Phase.FIRING:
            if begun is not None and begun != change.since_step:
                changes.added.pop(begun, None)
                changes.removed.add(begun)
            begun = change.since_step
            changes.added[begun] = change
        elif change.phase is Phase.RESOLVED:
            begun = None
    changes.removed.difference_update(changes.added)
    return changes


def unaffected_before(step: int) -> int:
    """The step before which incidents must end to remain unchanged if onsets change from ``step`` on."""
    return step - NEAR_STEPS


def incidents_of(onsets: Iterable[Onset]) -> list[tuple[Onset, ...]]:
    """Group the onsets of one attempt into incidents, both sorted by step."""
    incidents: list[list[Onset]] = []
    configs: set[int] = set()
    extended = 0
    for onset in sorted(onsets, key=_by_step):
        if not incidents or onset.step > extended + NEAR_STEPS:
            incidents.append([])
            configs = set()
        incidents[-1].append(onset)
        if onset.config not in configs:
            configs.add(onset.config)
            extended = onset.step
    return [tuple(members) for members in incidents]


def cause_of(incident: Sequence[Onset]) -> Onset:
    """The likeliest cause of an incident.

    Args:
        incident: the onsets of the incident, as `incidents_of` returns them; at least one.
    """
    return _likeliest_first(incident)[0]


def incident_id(project: str, run: str, attempt: str, first_step: int) -> str:
    """The id of an attempt's incident that begins at a step."""
    text = json.dumps([project, run, attempt, first_step], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def summarize(identity: str, incident: Sequence[Onset], silent: Mapping[str, int]) -> IncidentSummary:
    """Summarize an incident.

    Args:
        identity: the id of the incident.
        incident: the onsets of the incident, as `incidents_of` returns them; at least one.
        silent: rules that judged rows of the attempt and never fired on it, with the number of judged steps.
    """
    ranked = _likeliest_first(incident)
    cause = ranked[0]
    fired = {onset.rule for onset in incident}
    names = dict.fromkeys(onset.name for onset in ranked)
    return IncidentSummary(
        id=identity,
        first_step=incident[0].step,
        last_step=incident[-1].step,
        alerts=tuple(names),
        cause=cause.name,
        message=_message(cause.finding, cause.step),
        check_first=cause.check,
        not_fired=tuple(
            f"{rule} ({silent[rule]:,} step{'' if silent[rule] == 1 else 's'})"
            for rule in _OTHER_CAUSES
            if rule in silent and rule not in fired
        ),
    )


def _by_step(onset: Onset) -> tuple[int, str, int]:
    return onset.step, onset.name, onset.config


def _likeliest_first(incident: Sequence[Onset]) -> list[Onset]:
    detected = incident[0].step + DETECTION_STEPS

    def likelihood(onset: Onset) -> tuple[bool, int, int, tuple[int, int], int, str, int]:
        stage, finding = _stage(onset), onset.finding
        is_lasting = stage == _SETTINGS and onset.rule not in _EXACT and onset.step <= detected
        return not is_lasting, onset.step, stage, finding.cause_rank, finding.worker, onset.name, onset.config

    return sorted(incident, key=likelihood)


def _stage(onset: Onset) -> int:
    """The stage of an onset's rule; that of data for values of the model's inputs that are not finite."""
    stage, finding = _STAGE.get(onset.rule.removeprefix("sagemaker_")), onset.finding
    if stage == _NUMBERS and (finding.role == "input" or finding.upstream):
        return _DATA
    if stage is not None:
        return stage
    return _GRADIENTS if finding.tensor else _OF_RUN


_INDENT = " " * 10


class Explanation(BaseModel):
    """The explanation of an alert.

    Attributes:
        title: the rule, severity, phase and step.
        since_step: the step from which the run is bad: the first of consecutive findings.
        seen: the finding's message, with the measured values.
        where: the tensor, its module, the module's class and its role; the rank and mode.
        against: the value and the threshold.
        since: the first step of consecutive findings.
        usual_causes: the usual causes of such a finding, the likeliest first; not a diagnosis of this run.
        what_to_try: remedies for these causes.
    """

    model_config = ConfigDict(frozen=True)

    title: str
    since_step: int
    seen: str
    where: str
    against: str
    since: str
    usual_causes: tuple[str, ...]
    what_to_try: tuple[str, ...]

    def as_text(self) -> str:
        """A block of lines for a message."""
        return "\n".join(self.as_lines())

    def as_lines(self) -> list[str]:
        """The lines of the block, for a terminal. Names in them come from user programs and may contain line breaks."""
        lines = [
            self.title,
            f"  seen    {self.seen}",
            f"  where   {self.where}",
            f"  against {self.against}",
            f"  since   {self.since}",
        ]
        for name, sentences in (("usually", self.usual_causes), ("try", self.what_to_try)):
            lines += [
                f"  {name:7} {sentence}" if place == 0 else _INDENT + sentence
                for place, sentence in enumerate(sentences)
            ]
        return lines


@dataclass(frozen=True)
class RunName:
    """Identifies an attempt of a run."""

    project: str
    run: str
    attempt: str


def explain(config: RuleConfig, transition: Transition) -> Explanation:
    """Explain an alert that fires or fired.

    Args:
        config: the rule config of the alert.
        transition: a transition to firing or resolved, with a finding.
    """
    finding, rule = _finding_of(transition), config.implementation
    advice = rule.advice(finding)
    name = config.name if config.name == config.rule else f"{config.name}, of rule {config.rule}"
    return Explanation(
        title=(
            f"{name} ({config.severity}) {phase_words(transition.phase.value, transition.since_step, transition.step)}"
            f"{_load(transition)}"
        ),
        since_step=transition.since_step,
        seen=_message(finding, transition.since_step),
        where=_where(finding),
        against=f"{number_text(finding.value)}, threshold {number_text(finding.threshold)}",
        since=_since(config, transition),
        usual_causes=tuple(map(sentence, advice.usual_causes)),
        what_to_try=tuple(map(sentence, advice.what_to_try)),
    )


def phase_words(phase: str, bad_from: int, step: int) -> str:
    """The phase of an alert in words: ``firing: bad from step 253``, or ``resolved at step 300``.

    Args:
        phase: the phase.
        bad_from: the first of consecutive findings.
        step: the step at which the alert came into the phase.
    """
    return f"{phase}: bad from step {bad_from}" if phase == Phase.FIRING.value else f"{phase} at step {step}"


def sentence(words: str) -> str:
    """Capitalize and punctuate an author's text; a leading name of a function or variable is left unchanged."""
    first_word = words.partition(" ")[0]
    is_name = any(letter in first_word for letter in "._(")
    text = words if is_name else words[:1].upper() + words[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def event_message(config: RuleConfig, transition: Transition, run: RunName) -> str:
    """The message of an event: the rule config's own message, or the finding's, with its step if that is not the alert's."""
    finding = _finding_of(transition)
    if config.message is None:
        return _message(finding, transition.since_step)
    values = {
        "name": config.name,
        "rule": config.rule,
        "severity": config.severity,
        "project": run.project,
        "run": run.run,
        "attempt": run.attempt,
        "step": str(finding.step),
        "mode": finding.mode,
        "worker": str(finding.worker),
        "tensor": finding.tensor or "the run",
        "module": finding.module,
        "module_type": finding.module_type,
        "role": finding.role,
        "value": number_text(finding.value),
        "threshold": number_text(finding.threshold),
        "message": finding.message,
        "since_step": str(transition.since_step),
        **{rule_config.LABEL + name: value for name, value in config.labels.items()},
    }
    return rule_config.fill(config.message, values)


def _finding_of(transition: Transition) -> Finding:
    assert transition.finding is not None  # firing and resolved transitions have a finding
    return transition.finding


def _message(finding: Finding, since_step: int) -> str:
    """The finding's message, with its step if an earlier finding made the run bad: a rule that waits for several describes the last."""
    return f"at step {finding.step}: {finding.message}" if finding.step > since_step else finding.message


def _load(transition: Transition) -> str:
    if transition.loaded_at is None:
        return ""
    return f": the program loaded weights after step {transition.loaded_at}"


def _where(finding: Finding) -> str:
    if not finding.tensor:
        return "the run as a whole"
    tensor = finding.tensor
    if finding.module:
        tensor += f": {finding.role or 'tensor'} of module {finding.module} ({finding.module_type})"
    elif finding.role:
        tensor += f": a {finding.role}"
    return f"{tensor}; worker {finding.worker}, mode {finding.mode}"


def _since(config: RuleConfig, transition: Transition) -> str:
    finding = _finding_of(transition)
    since = f"step {transition.since_step}"
    if finding.step == transition.since_step:
        return f"{since}, the first finding"
    duration = (
        f"{config.hold.steps} judged steps in a row" if config.hold.steps > 1 else "judged steps in a row"
    )
    if config.hold.seconds:
        duration += f" and {config.hold.seconds:g} s"
    return f"{since}, up to step {finding.step} when it had lasted for {duration}"
