"""Rule configs as Python code: ``vanishing_gradient(threshold=1e-7).lasting(steps=3).notify("ml-oncall")``.

`AttachedRule` is a rule config with methods. `capture_needs` lists what a recorder must capture for rule configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec

from pydantic import ValidationError

from watchstep.capture.config import CaptureConfig, parsed
from watchstep.errors import RuleError
from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.tensors import FINITE_CHECKS, SAVED, SYSTEM
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule import Params, Severity


def reads_tensors(config: RuleConfig) -> bool:
    """Whether a rule config judges full tensors. One whose needs cannot be determined does not."""
    try:
        return config.implementation.needed(config.parameters).tensors is not None
    except Exception:  # noqa: BLE001 - reported by the evaluation
        return False


def capture_needs(configs: Iterable[RuleConfig]) -> tuple[CaptureNeed, ...]:
    """What rule configs need a recorder to capture beyond its default configuration: full tensors, probes with arguments, collections.

    A rule whose needs cannot be determined needs nothing here; its evaluation reports why.
    """
    needs: list[CaptureNeed] = []
    for config in configs:
        try:
            needs += _needs_of(config)
        except Exception:  # noqa: BLE001, S112 - reported by the evaluation, and must not keep a run from being registered
            continue
    return tuple(needs)


def _needs_of(config: RuleConfig) -> list[CaptureNeed]:
    """The need of one rule config, if it has one.

    Raises:
        ValueError: a control document cannot contain it.
    """
    needed = config.implementation.needed(config.parameters)
    collections = (config.tensors.collection,) if config.tensors.collection else needed.collections
    probes = tuple(probe for probe in needed.probes if parsed(probe) is not None)
    tensors = needed.tensors
    if tensors is None and not probes and set(collections) <= _RECORDED:
        return []
    every, modes = (0, ()) if tensors is None else (tensors.every, tensors.modes)
    need = CaptureNeed(config.name, tuple(collections), probes, every, modes)
    return [CaptureNeed.from_data(asdict(need))]


_RECORDED = frozenset(CaptureConfig().collections) | {SYSTEM, FINITE_CHECKS, SAVED}
"""Collections that a recorder captures by default."""

_Arguments = ParamSpec("_Arguments")

_DEFAULT_SEVERITY = {config.rule: {"severity": config.severity} for config in DEFAULT_RULES}
"""An attached rule has the severity of the default rules."""


@dataclass(frozen=True)
class AttachedRule:
    """A builder of a rule config. Each method returns a new builder and raises `RuleError` if a value is not valid.

    Attributes:
        config: the rule config.
    """

    config: RuleConfig

    def stop(self) -> AttachedRule:
        """Stop the job when the alert fires."""
        return self._with_action({"kind": "stop"})

    def snapshot(self) -> AttachedRule:
        """Take a snapshot of the workers' next step when the alert fires."""
        return self._with_action({"kind": "snapshot"})

    def notify(self, receiver: str) -> AttachedRule:
        """Notify a receiver of the service, by its name."""
        return self._with_action({"kind": "notify", "receiver": receiver})

    def webhook(self, url: str) -> AttachedRule:
        """Post the event to a URL."""
        return self._with_action({"kind": "webhook", "url": url})

    def dry_run(self) -> AttachedRule:
        """Evaluate and display the alert, but do not stop, notify or inhibit."""
        return self._with(dry_run=True)

    def named(self, name: str) -> AttachedRule:
        """Set the name of the rule config. A rule that is attached twice needs distinct names."""
        return self._with(name=name)

    def severe(self, severity: Severity) -> AttachedRule:
        """Set the severity."""
        return self._with(severity=severity)

    def labelled(self, **labels: str) -> AttachedRule:
        """Add labels, which each event contains."""
        return self._with(labels={**self.config.labels, **labels})

    def with_message(self, message: str) -> AttachedRule:
        """Set the message of events, with ``{fields}``."""
        return self._with(message=message)

    def on(
        self, collection: str | None = None, *, include: str | None = None, exclude: str | None = None
    ) -> AttachedRule:
        """Restrict the rule to tensors of a collection, and to names that match ``include`` and not ``exclude``."""
        return self._with(tensors={"collection": collection, "include": include, "exclude": exclude})

    def lasting(self, *, steps: int = 1, seconds: float = 0.0) -> AttachedRule:
        """Fire only after consecutive findings over this many judged steps and seconds."""
        return self._with(**{"for": {"steps": steps, "seconds": seconds}})

    def inhibiting(self, *names: str) -> AttachedRule:
        """Inhibit these rule configs, or rules, while this alert fires."""
        return self._with(inhibits=names)

    def _with_action(self, action: dict[str, str]) -> AttachedRule:
        actions = self.config.as_data()["actions"]
        return self if action in actions else self._with(actions=[*actions, action])

    def _with(self, **changes: Any) -> AttachedRule:
        return _attached({**self.config.as_data(), **changes})


def attachable(rule: str, params: Callable[_Arguments, Params]) -> Callable[_Arguments, AttachedRule]:
    """A function that creates a config of a rule from the rule's parameters.

    Args:
        rule: the name of the rule.
        params: the class of its parameters.
    """

    def attach(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> AttachedRule:
        try:
            checked = params(*args, **kwargs)
        except ValidationError as error:
            raise _invalid(rule, error) from error
        set_params = checked.model_dump(mode="json", exclude_unset=True)
        return _attached({"rule": rule, "params": set_params, **_DEFAULT_SEVERITY.get(rule, {})})

    attach.__name__ = attach.__qualname__ = rule
    attach.__doc__ = f"Attach rule {rule}. Raises `RuleError` if a parameter is not valid."
    return attach


def _attached(data: dict[str, Any]) -> AttachedRule:
    try:
        return AttachedRule(RuleConfig.model_validate(data))
    except ValidationError as error:
        raise _invalid(str(data["rule"]), error) from error


def _invalid(rule: str, error: ValidationError) -> RuleError:
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"])) or "parameters"
    return RuleError(f"rule {rule}, {field}: {first['msg']}", f"see 'watchstep rules show {rule}'")
