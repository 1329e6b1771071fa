"""A part of a model that gives nearly the same output for every example, which it told apart before."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import in_training, probe, whole_steps
from watchstep_rules.signals.tensor_selection import has_role, rows_where

_PROBE = "example_spread"
_TOLD_APART = 20.0
_SHRUNK = 0.01
_IGNORED = 10.0
_REGRESSIONS = ("MseLoss", "SmoothL1Loss", "HuberLoss")


class RepresentationCollapseParams(Params):
    """Parameters of `RepresentationCollapse`."""

    share: float = Field(
        1e-3, gt=0, lt=0.05, description="Share of the mean square that differs between examples, at most."
    )
    records: int = Field(5, ge=1, le=1000, description="Consecutive records at which it is that small.")
    steps: int = Field(50, ge=0, description="Steps for which it has been that small.")
    features: int = Field(8, ge=2, description="Fewest features of an output.")


class Spread(NamedTuple):
    """What is known of an output.

    Attributes:
        largest: the largest share so far.
        records: consecutive records with a small share.
        since: the step of the first of them.
        size: the largest mean square so far.
    """

    largest: float = 0.0
    records: int = 0
    since: int = 0
    size: float = 0.0


class RepresentationCollapseState(State):
    """State of `RepresentationCollapse`.

    Attributes:
        outputs: by ``tensor@worker``.
        last: order of the last layer that was measured.
        is_regression: whether a loss was computed by a function for targets that are numbers.
    """

    outputs: dict[str, Spread] = Field(default_factory=dict)
    last: int = -1
    is_regression: bool = False


class RepresentationCollapse(Rule[RepresentationCollapseParams, RepresentationCollapseState]):
    """Fires when the outputs of a linear layer become nearly equal for all examples, at ``records`` consecutive records and for ``steps``.

    The measure is the share of the mean square that differs between examples, ``sum_j var(x_j) / sum_j mean(x_j^2)`` over features j, with
    variance and mean over the examples of a batch. It must be at most ``share`` (a standard deviation of 3 % of the size), after it has
    been at least 20 times as large, while an earlier layer has at least that at the same step: the inputs still differ. It is measured
    at the first and last linear layer of each part of the model, in batches of eight examples or more.

    That embeddings are constant is the trivial solution of learning without negative pairs (Chen and He, Exploring Simple Siamese
    Representation Learning, 2021, section 4.1), and of a triplet loss whose value remains at its margin (Schroff et al., FaceNet, 2015,
    section 3.2).

    The decoder of a variational autoencoder has nearly the same output for all examples if it ignores the code, which is called posterior
    collapse (Bowman et al., Generating Sentences from a Continuous Space, 2016); noise in the code leaves some of the variation. So the
    limit is 10 times as high while the mean square of an earlier layer's output, the code, is at most a hundredth of its largest.

    Not reported are:

    - outputs with fewer than ``features`` features, such as values and regressions of one target;
    - the last layer, unless a code has shrunk, if a loss is one of regression (`mse_loss`, `smooth_l1_loss`, `huber_loss`): its targets may be nearly constant;
    - outputs that never differed, such as those of a constant input;
    - outputs with a small scale: mean and variance shrink together.
    """

    name = "representation_collapse"
    summary = "a part of the model gives nearly the same output for every example"
    needs = Needs(
        collections=("activations", "losses"), roles=("output", "loss"), probes=(_PROBE,), about=("output",)
    )
    merge = "per_worker"
    usual_causes = (
        "Both branches of a siamese training get gradients: stop-gradient, predictor or averaged target is missing.",
        "A triplet or contrastive loss with hard negatives from the first step, or a margin that is never reached.",
        "The term of an autoencoder that pulls codes to a prior has such a weight that the decoder ignores the code.",
        "Units before this layer are dead, so that only its bias is left.",
    )
    what_to_try = (
        "Check which branches are detached, and that the loss rises for equal embeddings.",
        "Begin with random or semi-hard negatives, and with a lower learning rate.",
        "Raise the weight of the divergence from zero over the first epochs, or leave a minimum of it free.",
        "Log the standard deviation of normalized embeddings over a batch: 1/sqrt(features) is its size for spread embeddings.",
    )
    cannot_distinguish = (
        "Targets of eight or more numbers that are nearly constant and learned by a loss of the program's own, from a collapse.",
        "A policy of eight or more actions that chooses the same one in every state on purpose, from a collapse.",
        "A collapse to a few points, or to a line, is not seen; neither is one behind a normalization over the batch, nor in convolutions.",
    )

    def conclusive(self, params: RepresentationCollapseParams, block: Block) -> NDArray[np.bool_]:
        """Rows with the probe."""
        return has_probe(block, _PROBE)

    def evaluate(
        self,
        params: RepresentationCollapseParams,
        state: RepresentationCollapseState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[RepresentationCollapseState, list[Finding]]:
        """Follow the outputs, step by step."""
        block = in_training(block)
        chosen = has_probe(block, _PROBE) & rows_where(block, has_role, "output")
        if not chosen.any():
            is_regression = state.is_regression or bool(rows_where(block, _is_regression).any())
            return state.model_copy(update={"is_regression": is_regression}), []
        regression = rows_where(block, _is_regression)
        outputs, last, is_regression = dict(state.outputs), state.last, state.is_regression
        shares, sizes, findings = probe(block, _PROBE), _sizes(block), []
        for rows in whole_steps(block):
            is_regression |= bool(regression[rows].any())
            measured: list[int] = rows[chosen[rows]].tolist()
            last = max([last, *(block.info(row).order for row in measured)])
            measured.sort(key=lambda row: block.info(row).order)
            shrunk: set[int] = set()
            for row in measured:
                key, share = f"{block.info(row).name}@{block.worker[row]}", float(shares[row])
                limit = params.share * (_IGNORED if int(block.worker[row]) in shrunk else 1)
                spread = _after(outputs.get(key, Spread()), share, int(block.step[row]), limit)
                outputs[key] = spread = spread._replace(size=max(spread.size, float(sizes[row])))
                if _has_collapsed(block, row, spread, params, limit) and (
                    limit > params.share or not (is_regression and block.info(row).order == last)
                ):
                    before = _differs(block, row, measured, shares, _TOLD_APART * params.share)
                    if before is not None:
                        findings.append(self._finding(block, row, share, spread, before, limit))
                if sizes[row] <= _SHRUNK * spread.size:
                    shrunk.add(int(block.worker[row]))
        return RepresentationCollapseState(outputs=outputs, last=last, is_regression=is_regression), findings

    def _finding(
        self,
        block: Block,
        row: int,
        share: float,
        spread: Spread,
        before: int,
        limit: float,
    ) -> Finding:
        message = (
            f"{block.info(row).name} is nearly the same for every example: {share:.2g} of its mean square differs between examples "
            f"(at most {spread.largest:.2g} before), at {spread.records} records in a row since step {spread.since}; "
            f"{block.info(before).name} still differs"
        )
        return finding_at(self.name, block, row, value=share, threshold=limit, message=message)


def _is_regression(info: TensorInfo) -> bool:
    return info.role == "loss" and info.module_type in _REGRESSIONS


def _sizes(block: Block) -> NDArray[np.float64]:
    """The mean square of each row."""
    statistics = block.statistics
    return statistics.mean**2 + statistics.m2 / np.maximum(statistics.finite, 1)


def _after(spread: Spread, share: float, step: int, limit: float) -> Spread:
    largest = max(spread.largest, share)
    if share > limit:
        return Spread(largest, size=spread.size)
    return Spread(
        largest, min(spread.records + 1, 1000), spread.since if spread.records else step, spread.size
    )


def _has_collapsed(
    block: Block, row: int, spread: Spread, params: RepresentationCollapseParams, limit: float
) -> bool:
    lasts = spread.records >= params.records and block.step[row] >= spread.since + params.steps
    shape = block.info(row).shape
    return lasts and spread.largest >= _TOLD_APART * limit and shape[-1] >= params.features


def _differs(
    block: Block, row: int, measured: list[int], shares: NDArray[np.float64], least: float
) -> int | None:
    """The nearest earlier layer of the step and worker with outputs that differ between examples."""
    order, worker = block.info(row).order, block.worker[row]
    earlier = [
        other
        for other in measured
        if block.worker[other] == worker and block.info(other).order < order and shares[other] >= least
    ]
    return max(earlier, key=lambda other: block.info(other).order, default=None)
