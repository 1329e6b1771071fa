"""SageMaker rules about inputs, labels and predictions: images, class imbalance, confusion matrices and token ratios."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from watchstep.capture.config import CHANNEL_SUM, MAX_CHANNELS, TOKEN_COUNT, TOKENS, element_probe
from watchstep.format.block import Block, sort_key
from watchstep.format.tensors import TensorInfo
from watchstep_rules.builtin.data.class_imbalance import ClassImbalance
from watchstep_rules.builtin.data.confusion import Confusion
from watchstep_rules.builtin.data.input_image_mean import InputImageMean
from watchstep_rules.builtin.data.token_ratio import TokenRatio
from watchstep_rules.builtin.sagemaker.parameters import (
    AmazonParams,
    ElementCoverage,
    Patterns,
    is_matched,
    is_output_of,
    percent_of,
)
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import check, has_role, rows_where

_IMAGES = 4


class SagemakerCheckInputImagesParams(AmazonParams):
    """Parameters of `SagemakerCheckInputImages`."""

    amazon: ClassVar[str] = "CheckInputImages"
    threshold_mean: float = Field(0.2, ge=0, description="How far from zero the mean of a channel may be.")
    threshold_samples: int = Field(500, ge=1, description="Number of images before the mean is judged.")
    regex: str | None = Field(
        None, description="Inputs by name, Watchstep's or SageMaker's; all images if null."
    )
    channel: int = Field(1, ge=-4, le=3, description="Which dimension of the images counts the channels.")

    def model_post_init(self, context: object, /) -> None:
        """Check the regular expression."""
        del context
        check(self.regex or "")

    @property
    def probe(self) -> str:
        """The probe that sums each channel."""
        return element_probe(CHANNEL_SUM, self.channel)


class ChannelMoments(NamedTuple):
    """Number of images so far, number of values of each channel, and the sum of each channel."""

    images: float = 0.0
    values: float = 0.0
    sums: tuple[float, ...] = ()


class SagemakerCheckInputImagesState(ElementCoverage):
    """Channel moments so far, by ``tensor@worker/mode``."""

    inputs: dict[str, ChannelMoments] = Field(default_factory=dict)


class SagemakerCheckInputImages(Rule[SagemakerCheckInputImagesParams, SagemakerCheckInputImagesState]):
    """Fires when ``|mean| > threshold_mean`` of a channel of the images so far, ``threshold_samples`` of them at least.

    SageMaker's CheckInputImages, with its defaults; the mean runs over all images that were recorded. Judged are inputs of models that are
    floats of four dimensions with up to four channels. `input_image_mean` holds the mean against the deviation, which does not
    depend on the range of the images.
    """

    name = "sagemaker_check_input_images"
    summary = "a channel of the input images is not centred on zero, by SageMaker's criterion"
    needs = Needs(("inputs",), ("input",))
    merge = "per_worker"
    usual_causes = InputImageMean.usual_causes
    what_to_try = InputImageMean.what_to_try

    def needed(self, params: SagemakerCheckInputImagesParams) -> Needs:
        """Return the needs, including sums by channel."""
        return Needs(self.needs.collections, self.needs.roles, probes=(params.probe,))

    def problem(self, state: SagemakerCheckInputImagesState) -> str:
        """Return what to do if the recorder did not sum channels."""
        return state.problem("the sums of colour channels")

    def conclusive(self, params: SagemakerCheckInputImagesParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows with channel sums."""
        return has_probe(block, f"{params.probe}:0")

    def evaluate(
        self,
        params: SagemakerCheckInputImagesParams,
        state: SagemakerCheckInputImagesState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SagemakerCheckInputImagesState, list[Finding]]:
        """Evaluate all images of a series so far."""
        images = rows_where(block, _are_images, params.channel)
        if params.regex is not None:
            images = images & rows_where(block, is_matched, (params.regex,))
        sums = np.stack(
            [probe(block, f"{params.probe}:{channel}") for channel in range(MAX_CHANNELS)], axis=1
        )
        coverage = state.after(images, sums[:, 0])
        inputs, findings = dict(state.inputs), []
        for row in np.flatnonzero(images & np.isfinite(sums[:, 0]) & (block.statistics.count > 0)).tolist():
            info = block.info(row)
            name = f"{info.name}@{block.worker[row]}/{block.mode_name(row)}"
            channels = sums[row][np.isfinite(sums[row])]
            moments = inputs[name] = _after(inputs.get(name, ChannelMoments()), block, row, channels)
            means = np.array(moments.sums) / moments.values
            worst = int(np.abs(means).argmax())
            if moments.images >= params.threshold_samples and abs(means[worst]) > params.threshold_mean:
                message = (
                    f"the mean of channel {worst} of {info.name} is {means[worst]:.3g} over {moments.images:.0f} images, more than "
                    f"{params.threshold_mean:g} from zero"
                )
                findings.append(
                    finding_at(
                        self.name,
                        block,
                        row,
                        value=float(abs(means[worst])),
                        threshold=params.threshold_mean,
                        message=message,
                    )
                )
        state = SagemakerCheckInputImagesState(
            measured=coverage.measured, lacking=coverage.lacking, inputs=inputs
        )
        return state, findings


def _are_images(info: TensorInfo, channel: int) -> bool:
    shape = info.shape
    return len(shape) == _IMAGES and "float" in info.dtype and shape[channel] <= MAX_CHANNELS


def _after(
    moments: ChannelMoments, block: Block, row: int, channels: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> ChannelMoments:
    """Add a record. The count of elements determines the number of images in a batch, because all have the same shape."""
    count = float(block.statistics.count[row])
    before = moments.sums if len(moments.sums) == len(channels) else (0.0,) * len(channels)
    return ChannelMoments(
        moments.images + count / (prod(block.info(row).shape[1:]) or 1),
        moments.values + count / len(channels),
        tuple(old + float(new) for old, new in zip(before, channels, strict=True)),
    )


class SagemakerClassImbalanceParams(AmazonParams):
    """Parameters of `SagemakerClassImbalance`."""

    amazon: ClassVar[str] = "ClassImbalance"
    threshold_imbalance: float = Field(
        10.0, gt=0, description="How many times the smallest class the largest may be."
    )
    threshold_misprediction: float = Field(
        0.7, ge=0, le=1, description="Share of a class's examples that may be predicted wrong."
    )
    samples: int = Field(500, ge=1, description="Labels that there must have been.")
    argmax: bool = Field(
        False,
        description="Accepted and without effect: of scores the largest is taken, classes are taken as they are.",
    )
    labels_regex: Patterns = Field((".*labels",), description="Labels by name.")
    predictions_regex: Patterns = Field(
        (".*predictions",),
        description="Accepted and without effect: predictions are what is recorded as outputs or predictions.",
    )


class SagemakerClassImbalance(Rule[SagemakerClassImbalanceParams, State]):
    """Fires when ``largest class / smallest class > threshold_imbalance``, or ``1 - correct / examples > threshold_misprediction``.

    SageMaker's ClassImbalance, with its defaults, among ``samples`` labels or more. Both count over all recorded batches
    so far. Give labels, and what was predicted for them, by ``hook.record(labels=…, predictions=…)``. With 500 labels chance
    alone makes ratios above ten where a class is rare: `class_imbalance` rules chance out.
    """

    name = "sagemaker_class_imbalance"
    summary = "the largest class is many times the smallest, or a class is predicted wrong, by SageMaker's criterion"
    needs = Needs(collections=("labels", "confusion"), roles=("label", "confusion"), probes=("class_counts",))
    merge = "watermark"
    usual_causes = ClassImbalance.usual_causes
    what_to_try = ClassImbalance.what_to_try

    def conclusive(self, params: SagemakerClassImbalanceParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows with labels."""
        return has_probe(block, "labels_counted", "all_examples")

    def evaluate(
        self, params: SagemakerClassImbalanceParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Evaluate the counts so far, step by step."""
        findings = self._imbalanced(params, block) | self._mispredicted(params, block)
        return state, [findings[row] for row in sorted(findings)]

    def _imbalanced(self, params: SagemakerClassImbalanceParams, block: Block) -> dict[int, Finding]:
        labels, largest, smallest, rarest = (
            probe(block, name)
            for name in ("labels_counted", "largest_class", "smallest_class", "rarest_class")
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = largest / smallest
        named = rows_where(block, has_role, "label") & rows_where(block, is_matched, params.labels_regex)
        is_imbalanced = named & (labels >= params.samples) & (ratio > params.threshold_imbalance)
        return {
            row: finding_at(
                self.name,
                block,
                row,
                value=float(ratio[row]),
                threshold=params.threshold_imbalance,
                message=(
                    f"of {labels[row]:.0f} {block.info(row).name} so far {smallest[row]:.0f} are class {rarest[row]:.0f}, "
                    f"and {largest[row]:.0f} are of the largest class"
                ),
            )
            for row in np.flatnonzero(is_imbalanced).tolist()
        }

    def _mispredicted(self, params: SagemakerClassImbalanceParams, block: Block) -> dict[int, Finding]:
        examples, correct = probe(block, "all_examples"), probe(block, "all_correct")
        with np.errstate(divide="ignore", invalid="ignore"):
            wrong = 1 - correct / examples
        findings = {}
        for rows in whole_matrices(block):
            if examples[rows].sum() < params.samples:
                continue
            for row in rows[wrong[rows] > params.threshold_misprediction].tolist():
                message = (
                    f"{block.info(row).name}: of {examples[row]:.0f} examples so far {wrong[row]:.0%} were predicted wrong, more "
                    f"than {params.threshold_misprediction:.0%}"
                )
                findings[row] = finding_at(
                    self.name,
                    block,
                    row,
                    value=float(wrong[row]),
                    threshold=params.threshold_misprediction,
                    message=message,
                )
        return findings


def whole_matrices(block: Block) -> Iterator[NDArray[np.intp]]:
    """Yield the rows of each matrix of a block of whole steps, int64 of shape (classes,), ascending by class."""
    rows = np.flatnonzero(rows_where(block, has_role, "confusion"))
    if not len(rows):
        return
    key = sort_key(block.step[rows], block.worker[rows], block.mode[rows])
    order = np.argsort(key, kind="stable")
    for part in np.split(rows[order], np.flatnonzero(np.diff(key[order])) + 1):
        yield np.array(sorted(part.tolist(), key=lambda row: class_of(block, row)), np.intp)


def class_of(block: Block, row: int) -> int:
    """Return the class of a row, from its name."""
    return int(block.info(row).name.rpartition("/")[2])


_LABELS = ("labels",)
_PREDICTIONS = ("predictions", "outputs")


class SagemakerConfusionParams(AmazonParams):
    """Parameters of `SagemakerConfusion`."""

    amazon: ClassVar[str] = "Confusion"
    category_no: int | None = Field(
        None,
        ge=2,
        le=100,
        description="How many classes there are; as many as labels and predictions show if null.",
    )
    labels: str = Field("labels", description="Only 'labels': what hook.record(labels=…) is given.")
    predictions: str = Field(
        "predictions", description="'predictions' or 'outputs', as hook.record is given them."
    )
    labels_collection: str = Field("labels", description="Only 'labels'.")
    predictions_collection: str = Field("predictions", description="'predictions' or 'outputs'.")
    min_diag: float = Field(0.9, ge=0, le=1, description="Share of a prediction that must be right.")
    max_off_diag: float = Field(0.1, ge=0, le=1, description="Share of it that may be of one other class.")

    @field_validator("labels", "labels_collection")
    @classmethod
    def _are_labels(cls, value: str) -> str:
        return _one_of(value, _LABELS)

    @field_validator("predictions", "predictions_collection")
    @classmethod
    def _are_predictions(cls, value: str) -> str:
        return _one_of(value, _PREDICTIONS)


class SagemakerConfusion(Rule[SagemakerConfusionParams, State]):
    """Fires for a class i with ``C[i][i] / Σ_j C[j][i] < min_diag``, or ``max_j≠i C[j][i] / Σ_j C[j][i] > max_off_diag``.

    ``C[j][i]`` counts examples with the label j that were predicted as i, over all recorded batches; it is judged once each
    class has been a label. Both are SageMaker's tests, in the form of the second: as the developer guide prints the first, with the sum
    of the diagonal below the line, it cannot hold for several classes. A class that was never predicted is not judged.
    ``category_no`` leaves out labels and predictions from it on. `confusion` judges what became of a class's own examples.
    """

    name = "sagemaker_confusion"
    summary = "a confusion matrix is not diagonal enough, by SageMaker's criterion"
    needs = Needs(collections=("confusion",), roles=("confusion",))
    merge = "watermark"
    usual_causes = Confusion.usual_causes
    what_to_try = Confusion.what_to_try

    def conclusive(self, params: SagemakerConfusionParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows with examples."""
        return has_probe(block, "all_examples")

    def evaluate(
        self, params: SagemakerConfusionParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Evaluate each matrix."""
        examples, correct, predicted, mistaken, other = (
            probe(block, name)
            for name in ("all_examples", "all_correct", "all_predicted", "all_mistaken", "all_mistaken_for")
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            right, wrong = correct / predicted, mistaken / predicted
        findings = {}
        for rows in whole_matrices(block):
            class_rows = (
                rows
                if params.category_no is None
                else rows[[class_of(block, row) < params.category_no for row in rows.tolist()]]
            )
            if len(class_rows) < (params.category_no or 2) or not (examples[class_rows] > 0).all():
                continue
            bad = (right[class_rows] < params.min_diag) | (wrong[class_rows] > params.max_off_diag)
            for row in class_rows[bad].tolist():
                name = block.info(row).name
                description = f"{name}: of {predicted[row]:.0f} predictions {right[row]:.0%} are right"
                if right[row] < params.min_diag:
                    value, limit, expectation = (
                        right[row],
                        params.min_diag,
                        f"at least {params.min_diag:.0%} should be",
                    )
                else:
                    value, limit = wrong[row], params.max_off_diag
                    expectation = f"{value:.0%} are of class {other[row]:.0f}, {limit:.0%} may be"
                findings[row] = finding_at(
                    self.name,
                    block,
                    row,
                    value=float(value),
                    threshold=limit,
                    message=f"{description}; {expectation}",
                )
        return state, [findings[row] for row in sorted(findings)]


def _one_of(value: str, names: tuple[str, ...]) -> str:
    if value not in names:
        raise ValueError(
            f"{value!r}: the recorder pairs what it is given by hook.record(labels=…, predictions=…); use "
            f"{' or '.join(map(repr, names))}"
        )
    return value


_MOST_TOKENS = 16


def _numbers(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, int | float) else value


class SagemakerNlpSequenceRatioParams(AmazonParams):
    """Parameters of `SagemakerNlpSequenceRatio`."""

    amazon: ClassVar[str] = "NLPSequenceRatio"
    tensor_regex: Patterns | None = Field(
        None, description="Embeddings by name, Watchstep's or SageMaker's; all where it is left out."
    )
    token_values: Annotated[
        tuple[int, ...],
        BeforeValidator(_numbers, json_schema_input_type=str | int | list[int]),
        Field(min_length=1, max_length=_MOST_TOKENS),
    ] = Field((0,), description="The tokens that are counted, as '3, 0' or a list.")
    token_thresholds_percent: Annotated[
        tuple[float, ...],
        BeforeValidator(_numbers, json_schema_input_type=str | float | list[float]),
        Field(max_length=_MOST_TOKENS),
    ] = Field((50.0, 50.0), validate_default=True, description="Percent that each of them may make up.")

    @field_validator("token_thresholds_percent")
    @classmethod
    def _is_one_each(cls, value: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        tokens = info.data.get("token_values", ())
        if len(value) < len(tokens):
            raise ValueError(f"{len(value)} thresholds for {len(tokens)} token_values: give one for each")
        return value

    @property
    def probes(self) -> tuple[str, ...]:
        """The probes that count each token."""
        return tuple(element_probe(TOKEN_COUNT, token) for token in self.token_values)


class SagemakerNlpSequenceRatio(Rule[SagemakerNlpSequenceRatioParams, ElementCoverage]):
    """Fires when a token of ``token_values`` makes up more than its percentage of what an embedding is given in a step.

    SageMaker's NLPSequenceRatio, with its defaults. Embeddings are found by type; ``tensor_regex`` takes some of them. `token_ratio`
    averages over some steps.
    """

    name = "sagemaker_nlp_sequence_ratio"
    summary = "a token makes up much of an embedding's input, by SageMaker's criterion"
    needs = Needs(("activations",), ("output",))
    merge = "per_worker"
    usual_causes = TokenRatio.usual_causes
    what_to_try = TokenRatio.what_to_try

    def needed(self, params: SagemakerNlpSequenceRatioParams) -> Needs:
        """Return the needs, including counts of these tokens."""
        return Needs(self.needs.collections, self.needs.roles, probes=params.probes)

    def problem(self, state: ElementCoverage) -> str:
        """Return what to do if the recorder did not count."""
        return state.problem("counts of these tokens")

    def conclusive(self, params: SagemakerNlpSequenceRatioParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows with counted tokens."""
        return has_probe(block, *params.probes)

    def evaluate(
        self,
        params: SagemakerNlpSequenceRatioParams,
        state: ElementCoverage,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[ElementCoverage, list[Finding]]:
        """Evaluate each record independently."""
        embeddings = rows_where(block, is_output_of, "Embedding")
        named = np.ones(len(block), np.bool_)
        if params.tensor_regex is not None:
            named = rows_where(block, is_matched, params.tensor_regex)
        findings: dict[int, Finding] = {}
        for token, limit, name in zip(
            params.token_values, params.token_thresholds_percent, params.probes, strict=False
        ):
            share = percent_of(block, name, TOKENS)
            state = state.after(embeddings & named, share)
            for row in np.flatnonzero(named & (share > limit)).tolist():
                message = f"{share[row]:.3g} % of what the embedding of {block.info(row).name} was given is token {token}, {limit:g} % may be"
                findings.setdefault(
                    row,
                    finding_at(
                        self.name, block, row, value=float(share[row]), threshold=limit, message=message
                    ),
                )
        return state, [findings[row] for row in sorted(findings)]
