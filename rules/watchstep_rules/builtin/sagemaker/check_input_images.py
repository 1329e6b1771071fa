"""Images one of whose colour channels is not centred on zero."""

from __future__ import annotations

from math import prod
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.capture.config import CHANNEL_SUM, MOST_CHANNELS, element_probe
from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.builtin.data.input_image_mean import InputImageMean
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams, ElementCoverage, is_matched
from watchstep_rules.rule import Finding, Needs, Rule, finding_at
from watchstep_rules.signals.name_pattern import check
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import rows_where

_IMAGES = 4


class SagemakerCheckInputImagesParams(AmazonParams):
    """Parameters of `SagemakerCheckInputImages`."""

    amazon: ClassVar[str] = "CheckInputImages"
    threshold_mean: float = Field(0.2, ge=0, description="How far from zero the mean of a channel may be.")
    threshold_samples: int = Field(500, ge=1, description="Images that are looked at before it is judged.")
    regex: str | None = Field(
        None, description="Inputs by name, Watchstep's or SageMaker's; all images if null."
    )
    channel: int = Field(1, ge=-4, le=3, description="Which dimension of the images counts the channels.")

    def model_post_init(self, context: object, /) -> None:
        """See that the expression can be used."""
        del context
        check(self.regex or "")

    @property
    def probe(self) -> str:
        """The probe that adds channels up."""
        return element_probe(CHANNEL_SUM, self.channel)


class ChannelMoments(NamedTuple):
    """Images so far, values of each channel, and the sum of each."""

    images: float = 0.0
    values: float = 0.0
    sums: tuple[float, ...] = ()


class SagemakerCheckInputImagesState(ElementCoverage):
    """What was seen, by ``tensor@worker/mode``."""

    inputs: dict[str, ChannelMoments] = Field(default_factory=dict)


class SagemakerCheckInputImages(Rule[SagemakerCheckInputImagesParams, SagemakerCheckInputImagesState]):
    """Fires when ``|mean| > threshold_mean`` of a channel of the images so far, ``threshold_samples`` of them at least.

    SageMaker's CheckInputImages, with its defaults; the mean runs over all images that were recorded. Judged are inputs of models that are
    floats of four dimensions with up to four channels. `input_image_mean` holds the mean against the deviation, which does not
    depend on the range of the images.
    """

    name = "sagemaker_check_input_images"
    summary = "a channel of the input images is not centred on zero, as SageMaker tests it"
    needs = Needs(("inputs",), ("input",))
    merge = "per_worker"
    usual_causes = InputImageMean.usual_causes
    what_to_try = InputImageMean.what_to_try
    params_type = SagemakerCheckInputImagesParams
    state_type = SagemakerCheckInputImagesState

    def needed(self, params: SagemakerCheckInputImagesParams) -> Needs:
        """Sums by channel."""
        return Needs(self.needs.collections, self.needs.roles, probes=(params.probe,))

    def problem(self, state: SagemakerCheckInputImagesState) -> str:
        """What to do where the recorder did not add up."""
        return state.problem("the sums of colour channels")

    def conclusive(self, params: SagemakerCheckInputImagesParams, block: Block) -> NDArray[np.bool_]:
        """Rows whose channels were summed up."""
        return has_probe(block, f"{params.probe}:0")

    def evaluate(
        self,
        params: SagemakerCheckInputImagesParams,
        state: SagemakerCheckInputImagesState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerCheckInputImagesState, list[Finding]]:
        """Judge all images of a series so far."""
        images = rows_where(block, _are_images, params.channel)
        if params.regex is not None:
            images = images & rows_where(block, is_matched, (params.regex,))
        sums = np.stack(
            [probe(block, f"{params.probe}:{channel}") for channel in range(MOST_CHANNELS)], axis=1
        )
        measured = state.after(images, sums[:, 0])
        inputs, findings = dict(state.inputs), []
        for row in np.flatnonzero(images & np.isfinite(sums[:, 0]) & (block.statistics.count > 0)).tolist():
            info = block.info(row)
            name = f"{info.name}@{block.worker[row]}/{block.mode_name(row)}"
            channels = sums[row][np.isfinite(sums[row])]
            seen = inputs[name] = _after(inputs.get(name, ChannelMoments()), block, row, channels)
            means = np.array(seen.sums) / seen.values
            worst = int(np.abs(means).argmax())
            if seen.images >= params.threshold_samples and abs(means[worst]) > params.threshold_mean:
                message = (
                    f"the mean of channel {worst} of {info.name} is {means[worst]:.3g} over {seen.images:.0f} images, more than "
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
            measured=measured.measured, lacking=measured.lacking, inputs=inputs
        )
        return state, findings


def _are_images(info: TensorInfo, channel: int) -> bool:
    shape = info.shape
    return len(shape) == _IMAGES and "float" in info.dtype and shape[channel] <= MOST_CHANNELS


def _after(
    seen: ChannelMoments, block: Block, row: int, channels: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> ChannelMoments:
    """With one record more. Of a batch the count tells how many images it has, for they are all of one shape."""
    count = float(block.statistics.count[row])
    before = seen.sums if len(seen.sums) == len(channels) else (0.0,) * len(channels)
    return ChannelMoments(
        seen.images + count / (prod(block.info(row).shape[1:]) or 1),
        seen.values + count / len(channels),
        tuple(old + float(new) for old, new in zip(before, channels, strict=True)),
    )
