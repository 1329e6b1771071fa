"""Units of a layer that began alike, learn, and never part."""

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
        description="How far units may be apart, over how far they have come, and still count as alike.",
    )
    records: int = Field(3, ge=1, le=1000, description="Records in a row at which they are alike.")


class SymmetricUnits(Rule[SymmetricUnitsParams, State]):
    """Fires when ``unit_spread <= share * unit_movement`` at ``records`` records in a row.

    The spread is the largest distance of any unit's weights from those of the first unit, the movement how far the first
    has come since it was first looked at. Units with the same weights in and out get the same gradient, so they stay one
    unit however long they learn: initialisation has to break the symmetry (Goodfellow, Bengio, Courville, Deep
    Learning, 2016, section 8.4). Rounding parts them by 1e-6 of what they move; where anything tells them apart they
    part as fast as they move, at the first update. One percent lies between, far from both.

    A layer that begins at one number and parts is fine: heads and branches that begin at zero do. A layer that does not
    move is not judged. ``poor_initialization`` says at once that weights begin alike; this rule says that they stay so.
    """

    name = "symmetric_units"
    summary = "all units of a layer learn the same"
    needs = Needs(collections=("weights",), roles=("weight",), probes=("unit_spread",))
    merge = "per_worker"
    usual_causes = (
        "This layer and the one after it begin at a constant.",
        "One row was copied into all of a layer's weights.",
    )
    what_to_try = (
        "Draw weights at random: torch.nn.init.kaiming_uniform_ or xavier_uniform_; biases may be zero.",
        "Let the layer's default initialisation stand.",
    )
    cannot_distinguish = (
        "Units that are tied on purpose, such as copies of a filter that a program keeps equal, from units that never part.",
    )

    def lookback(self, params: SymmetricUnitsParams) -> int:
        """The records before."""
        return params.records - 1

    def conclusive(self, params: SymmetricUnitsParams, block: Block) -> NDArray[np.bool_]:
        """Rows of weights whose units were followed."""
        return has_probe(block, "unit_spread")

    def evaluate(
        self, params: SymmetricUnitsParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each weight whose units were followed."""
        if "unit_spread" not in block.probes:
            return state, []

        def alike(rows: Block) -> NDArray[np.bool_]:
            spread, movement = probe(rows, "unit_spread"), probe(rows, "unit_movement")
            return (movement > 0) & (spread <= params.share * movement)

        found = in_a_row(context, block, alike, params.records)
        return state, [self._finding(params, block, int(row)) for row in np.flatnonzero(found)]

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
