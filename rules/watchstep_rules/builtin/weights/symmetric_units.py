"""Units of a layer that start equal and remain equal while they learn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import in_a_row, probe


class SymmetricUnitsParams(Params):
    """Parameters of `SymmetricUnits`."""

    share: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="Largest ratio of the distance between units to their movement at which they are equal.",
    )
    records: int = Field(3, ge=1, le=1000, description="Consecutive records with equal units.")


class SymmetricUnits(Rule[SymmetricUnitsParams, State]):
    """Fires when ``unit_spread <= share * unit_movement`` at ``records`` consecutive records.

    The spread is the largest distance of any unit's weights from those of the first unit; the movement is the distance that the first unit
    has moved since its first record. Units with equal incoming and outgoing weights get equal gradients, so they remain equal however long
    they learn: initialization must break the symmetry (Goodfellow, Bengio, Courville, Deep Learning, 2016, section 8.4). Rounding separates
    them by 1e-6 of their movement; any other difference separates them as fast as they move, at the first update. One percent is far from
    both.

    A layer that starts at a constant and separates is healthy, such as heads and branches that start at zero. A layer that does not move is
    not judged. ``poor_initialization`` reports immediately that weights start equal; this rule reports that they remain equal.
    """

    name = "symmetric_units"
    summary = "all units of a layer learn the same weights"
    needs = Needs(collections=("weights",), roles=("weight",), probes=("unit_spread",))
    merge = "per_worker"
    usual_causes = (
        "This layer and the next one start at a constant.",
        "One row was copied to all rows of a layer's weights.",
    )
    what_to_try = (
        "Initialize weights randomly: torch.nn.init.kaiming_uniform_ or xavier_uniform_; biases may be zero.",
        "Keep the layer's default initialization.",
    )
    cannot_distinguish = (
        "Units that are tied on purpose, such as copies of a filter that a program keeps equal, from units that remain equal by a fault.",
    )

    def lookback(self, params: SymmetricUnitsParams) -> int:
        """Return the number of previous records."""
        return params.records - 1

    def conclusive(self, params: SymmetricUnitsParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows of weights with recorded unit distances."""
        return has_probe(block, "unit_spread")

    def evaluate(
        self, params: SymmetricUnitsParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Evaluate each weight with recorded unit distances."""
        if "unit_spread" not in block.probes:
            return state, []

        def alike(rows: Block) -> NDArray[np.bool_]:
            spread, movement = probe(rows, "unit_spread"), probe(rows, "unit_movement")
            return (movement > 0) & (spread <= params.share * movement)

        is_hit = in_a_row(context, block, alike, params.records)
        return state, [self._finding(params, block, int(row)) for row in np.flatnonzero(is_hit)]

    def _finding(self, params: SymmetricUnitsParams, block: Block, row: int) -> Finding:
        info = block.info(row)
        spread, movement = (float(probe(block, name)[row]) for name in ("unit_spread", "unit_movement"))
        units = info.shape[0] if info.shape else 0
        message = (
            f"the {units} units of {info.name} have moved by {movement:.3g} and are at most {spread:.3g} apart, "
            f"at {params.records} records in a row"
        )
        return finding_at(
            self.name, block, row, value=spread / movement, threshold=params.share, message=message
        )
