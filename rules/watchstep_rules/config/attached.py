"""Rule configs as Python code: ``vanishing_gradient(threshold=1e-7).lasting(steps=3).notify("ml-oncall")``.

`AttachedRule` is a rule config with methods. `element_probes` lists the probes that a recorder must add for rule configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec

from pydantic import ValidationError

from watchstep.capture.config import parsed
from watchstep.errors import RuleError
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule import Params, Severity


def element_probes(configs: Iterable[RuleConfig]) -> tuple[str, ...]:
    """Names of the probes with arguments that some configs need, each once; as `CaptureConfig.probes` takes them."""
    needed = (probe for config in configs for probe in config.implementation.needed(config.parameters).probes)
    return tuple(dict.fromkeys(probe for probe in needed if parsed(probe) is not None))


_Given = ParamSpec("_Given")

_DEFAULT_SEVERITY = {config.rule: {"severity": config.severity} for config in DEFAULT_RULES}
"""A rule that is attached is as severe as by default."""


@dataclass(frozen=True)
class AttachedRule:
    """A rule config that is being written. Every method gives a new one; each raises `RuleError` for what cannot be.

    Attributes:
        config: as it stands.
    """

    config: RuleConfig

    def stop(self) -> AttachedRule:
        """Stop the job when the alert fires."""
        return self._with_action({"kind": "stop"})

    def snapshot(self) -> AttachedRule:
        """Have the workers take the full tensors of their next step when the alert fires."""
        return self._with_action({"kind": "snapshot"})

    def notify(self, receiver: str) -> AttachedRule:
        """Tell a receiver of the service, by its name."""
        return self._with_action({"kind": "notify", "receiver": receiver})

    def webhook(self, url: str) -> AttachedRule:
        """Post the event to an address."""
        return self._with_action({"kind": "webhook", "url": url})

    def dry_run(self) -> AttachedRule:
        """Judge and show the alert, but stop nothing and tell nobody."""
        return self._with(dry_run=True)

    def named(self, name: str) -> AttachedRule:
        """Give the config a name of its own: a rule that is attached twice needs one."""
        return self._with(name=name)

    def severe(self, severity: Severity) -> AttachedRule:
        """How bad it is."""
        return self._with(severity=severity)

    def labelled(self, **labels: str) -> AttachedRule:
        """Add words of your own, given with each event."""
        return self._with(labels={**self.config.labels, **labels})

    def saying(self, message: str) -> AttachedRule:
        """What an event says, with ``{fields}``."""
        return self._with(message=message)

    def on(
        self, collection: str | None = None, *, include: str | None = None, exclude: str | None = None
    ) -> AttachedRule:
        """Judge only tensors of a collection, and whose names patterns take in and leave out."""
        return self._with(tensors={"collection": collection, "include": include, "exclude": exclude})

    def lasting(self, *, steps: int = 1, seconds: float = 0.0) -> AttachedRule:
        """Fire only after so many judged steps, and so long, with findings in a row."""
        return self._with(**{"for": {"steps": steps, "seconds": seconds}})

    def inhibiting(self, *names: str) -> AttachedRule:
        """Keep these rule configs, or rules, quiet while this one's alert fires."""
        return self._with(inhibits=names)

    def _with_action(self, action: dict[str, str]) -> AttachedRule:
        held = self.config.as_data()["actions"]
        return self if action in held else self._with(actions=[*held, action])

    def _with(self, **changes: Any) -> AttachedRule:
        return _attached({**self.config.as_data(), **changes})


def attachable(rule: str, params: Callable[_Given, Params]) -> Callable[_Given, AttachedRule]:
    """A function that makes a config of a rule, and takes what the rule's parameters take.

    Args:
        rule: its name.
        params: the class of its parameters.
    """

    def attach(*args: _Given.args, **given: _Given.kwargs) -> AttachedRule:
        try:
            checked = params(*args, **given)
        except ValidationError as error:
            raise _refused(rule, error) from error
        written = checked.model_dump(mode="json", exclude_unset=True)
        return _attached({"rule": rule, "params": written, **_DEFAULT_SEVERITY.get(rule, {})})

    attach.__name__ = attach.__qualname__ = rule
    attach.__doc__ = f"Attach rule {rule}. Raises `RuleError` where a parameter cannot be used."
    return attach


def _attached(data: dict[str, Any]) -> AttachedRule:
    try:
        return AttachedRule(RuleConfig.model_validate(data))
    except ValidationError as error:
        raise _refused(str(data["rule"]), error) from error


def _refused(rule: str, error: ValidationError) -> RuleError:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "parameters"
    return RuleError(f"rule {rule}, {place}: {first['msg']}", f"see 'watchstep rules show {rule}'")
