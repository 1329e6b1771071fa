"""What compiled steps do themselves, as the open recordings of the process request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSettings:
    """Settings of the steps that are traced.

    Attributes:
        withholds: they leave out updates by gradients with NaN or infinity.
        measures: they measure their updates, instead of returning gradients; None if that depends on where JAX computes.
    """

    withholds: bool = False
    measures: bool | None = None


class _Requests:
    """The settings of each recording, by the id of its owner, and what follows for steps."""

    by_owner: dict[int, StepSettings] = {}  # noqa: RUF012 - of the process
    effective = StepSettings()

    @classmethod
    def changed(cls) -> None:
        chosen = list(cls.by_owner.values())
        measures = next((each.measures for each in reversed(chosen) if each.measures is not None), None)
        effective = StepSettings(any(each.withholds for each in chosen), measures)
        if effective != cls.effective:
            cls.effective = effective


def request_settings(owner: object, settings: StepSettings) -> None:
    """Request settings until `withdraw_settings`. Updates are left out if any recording requests it; of contrary wishes where to measure, the last counts.

    Args:
        owner: a recording, which lives until it withdraws them.
        settings: what it requests.
    """
    _Requests.by_owner[id(owner)] = settings
    _Requests.changed()


def withdraw_settings(owner: object) -> None:
    """Withdraw what a recording has requested."""
    _Requests.by_owner.pop(id(owner), None)
    _Requests.changed()


def effective_settings() -> StepSettings:
    """Return the settings of steps that are traced now: the same object until they change."""
    return _Requests.effective
