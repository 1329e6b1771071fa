"""The explanation of an alert: what was measured, where, against which threshold, since when, usual causes, and remedies.

The first four are figures of the run. The last two are general knowledge about the rule, and are presented as such.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from watchstep_rules.config import message_template
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Transition
from watchstep_rules.rule import Finding

_INDENT = " " * 10


class Explanation(BaseModel):
    """The explanation of an alert.

    Attributes:
        title: the rule, severity and step.
        seen: the finding's message, with the measured values.
        where: the tensor, its module, the module's class and its role; the rank and mode.
        against: the value and the threshold.
        since: the first step of consecutive findings.
        usual_causes: the usual causes of such a finding, the likeliest first; not a diagnosis of this run.
        what_to_try: remedies for these causes.
    """

    model_config = ConfigDict(frozen=True)

    title: str
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
        title=f"{name} ({config.severity}) {transition.phase.value} at step {transition.step}",
        seen=finding.message,
        where=_where(finding),
        against=f"{finding.value:.4g}, threshold {finding.threshold:.4g}",
        since=_since(config, transition),
        usual_causes=tuple(map(sentence, advice.usual_causes)),
        what_to_try=tuple(map(sentence, advice.what_to_try)),
    )


def sentence(words: str) -> str:
    """Capitalize and punctuate an author's text; a leading name of a function or variable is left unchanged."""
    first_word = words.partition(" ")[0]
    is_name = any(letter in first_word for letter in "._(")
    text = words if is_name else words[:1].upper() + words[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def event_message(config: RuleConfig, transition: Transition, run: RunName) -> str:
    """The message of an event: the rule config's own message, or the finding's."""
    finding = _finding_of(transition)
    if config.message is None:
        return finding.message
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
        "value": f"{finding.value:.4g}",
        "threshold": f"{finding.threshold:.4g}",
        "message": finding.message,
        "since_step": str(transition.since_step),
        **{message_template.LABEL + name: value for name, value in config.labels.items()},
    }
    return message_template.fill(config.message, values)


def _finding_of(transition: Transition) -> Finding:
    assert transition.finding is not None  # firing and resolved transitions have a finding
    return transition.finding


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
