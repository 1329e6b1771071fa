"""A rule config in the words that the commands have for it."""

from __future__ import annotations

from urllib.parse import urlsplit

from watchstep_rules.config.rule_config import KeepFiring, MinimumDuration, RuleConfig


def counted(number: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def lasting(held: MinimumDuration | KeepFiring) -> str:
    """How long, of ``for`` and ``keep_firing``."""
    steps = counted(held.steps, "step")
    return f"{steps} and {held.seconds:g} s" if held.seconds else steps


def after(config: RuleConfig) -> str:
    """After how long it fires; one that watches the clock counts no steps."""
    if not config.implementation.clock:
        return lasting(config.hold)
    return f"{config.hold.seconds:g} s" if config.hold.seconds else "one look at the clock"


def named(config: RuleConfig) -> str:
    """Its name, and the rule where that is called otherwise."""
    return config.name if config.name == config.rule else f"{config.name}, of rule {config.rule}"


def does(config: RuleConfig) -> list[str]:
    """What follows when it fires."""
    if config.dry_run:
        return ["dry run"]
    return [
        *(["stops the job"] if config.stops else []),
        *(f"posts to {urlsplit(url).hostname}" for url in config.webhooks),
        *(f"notifies {name}" for name in config.receivers),
    ]
