"""What rule configs need that a recorder measures only where it is asked to."""

from __future__ import annotations

from collections.abc import Iterable

from watchstep.capture.config import parsed
from watchstep_rules.config.rule_config import RuleConfig


def element_probes(configs: Iterable[RuleConfig]) -> tuple[str, ...]:
    """Names of the probes with arguments that some configs need, each once; as `CaptureConfig.probes` takes them."""
    needed = (probe for config in configs for probe in config.implementation.needed(config.parameters).probes)
    return tuple(dict.fromkeys(probe for probe in needed if parsed(probe) is not None))
