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
    """An alert, explained.

    Attributes:
        title: which rule, how severe, at which step.
        seen: what the rule saw, with the figures.
        where: the tensor, its module, the module's class, its role; the rank and mode.
        against: the value, and what it was held against.
        since: since when findings follow each other.
        usual_causes: what most often makes this rule find such a thing, the likeliest first; not what did so here.
        what_to_try: against each of these.
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
        """The lines of the block, for a terminal. Names in them come from programs, and may hold ends of lines."""
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
    """Which attempt of which run."""

    project: str
    run: str
    attempt: str


def explain(config: RuleConfig, transition: Transition) -> Explanation:
    """Explain an alert that fires, or did.

    Args:
        config: whose alert.
        transition: to firing or resolved; it has a finding.
    """
    finding, rule = _finding_of(transition), config.implementation
    advice = rule.advice(finding)
    name = config.name if config.name == config.rule else f"{config.name}, of rule {config.rule}"
    return Explanation(
        title=f"{name} ({config.severity}) {transition.phase.value} at step {transition.step}",
        seen=finding.message,
        where=_where(finding),
        against=f"{finding.value:.4g}, held against {finding.threshold:.4g}",
        since=_since(config, transition),
        usual_causes=tuple(map(sentence, advice.usual_causes)),
        what_to_try=tuple(map(sentence, advice.what_to_try)),
    )


def sentence(words: str) -> str:
    """Words of a rule's author as a sentence; names of functions and variables at its head stay as they are."""
    head = words.partition(" ")[0]
    begun = words if any(letter in head for letter in "._(") else words[:1].upper() + words[1:]
    return begun if begun.endswith((".", "!", "?")) else begun + "."


def say(config: RuleConfig, transition: Transition, run: RunName) -> str:
    """What an event says: the config's own message, or the finding's."""
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
    assert transition.finding is not None  # what fires or is resolved has one
    return transition.finding


def _where(finding: Finding) -> str:
    if not finding.tensor:
        return "the run as a whole"
    what = finding.tensor
    if finding.module:
        what += f": {finding.role or 'tensor'} of module {finding.module} ({finding.module_type})"
    elif finding.role:
        what += f": a {finding.role}"
    return f"{what}; worker {finding.worker}, mode {finding.mode}"


def _since(config: RuleConfig, transition: Transition) -> str:
    finding = _finding_of(transition)
    since = f"step {transition.since_step}"
    if finding.step == transition.since_step:
        return f"{since}, the first that was seen"
    lasted = (
        f"{config.hold.steps} judged steps in a row" if config.hold.steps > 1 else "judged steps in a row"
    )
    if config.hold.seconds:
        lasted += f" and {config.hold.seconds:g} s"
    return f"{since}, up to step {finding.step} when it had lasted for {lasted}"
