"""Thresholds that are parameters of a rule and apply to one recorded figure of a tensor, so that a picture of the figure can show them.

Most rules compare with earlier values, with other layers, or with a quantity that no column has. Their thresholds differ from step to step, and
are in their findings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from watchstep_rules.rule import Params

Side = Literal["above", "below"]


@dataclass(frozen=True)
class ConstantThreshold:
    """A threshold of all steps. It is a necessary condition of a finding; the rule's description states the others.

    Attributes:
        figure: the figure, as for `watchstep.Run.series`.
        parameter: the parameter of the rule.
        value: its value.
        side: on which side of the threshold values meet the condition.
    """

    figure: str
    parameter: str
    value: float
    side: Side


_PARAMETERS: dict[str, tuple[tuple[str, str, Side], ...]] = {
    "all_zero": (("share", "zero_share", "above"),),
    "tensor_variance": (("max_threshold", "variance", "above"), ("min_threshold", "variance", "below")),
    # The rule judges the mean magnitude of the non-zero elements, which is not smaller than that of all elements.
    "vanishing_gradient": (("threshold", "abs_mean", "below"),),
}
"""Rule → (parameter, figure, side)."""


def constant_thresholds(rule: str, params: Params) -> list[ConstantThreshold]:
    """Return the constant thresholds of a rule with these parameters; parameters without a value have none."""
    found = []
    for parameter, figure, side in _PARAMETERS.get(rule, ()):
        value = getattr(params, parameter)
        if value is not None:
            found.append(ConstantThreshold(figure, parameter, float(value), side))
    return found
