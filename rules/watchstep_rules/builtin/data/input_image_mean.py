"""Input images that are not centered."""

from __future__ import annotations

from math import prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at

_IMAGES = 4
"""Number of dimensions of a batch of images."""


class InputImageMeanParams(Params):
    """Parameters of `InputImageMean`."""

    ratio: float | None = Field(
        1.0, gt=0, description="Tolerated magnitude of the mean in standard deviations; null for any."
    )
    threshold: float | None = Field(None, gt=0, description="Tolerated magnitude of the mean; null for any.")
    samples: int = Field(500, ge=1, description="Images before the first evaluation.")


class ImageMoments(NamedTuple):
    """Images so far: their number, number of finite values, sum of the values, and sum of their squares."""

    images: float = 0.0
    values: float = 0.0
    total: float = 0.0
    squares: float = 0.0


class InputImageMeanState(State):
    """State of `InputImageMean`: moments by ``tensor@worker/mode``."""

    inputs: dict[str, ImageMoments] = Field(default_factory=dict)


class InputImageMean(Rule[InputImageMeanParams, InputImageMeanState]):
    """Fires when at least ``samples`` images so far have ``|mean| > ratio * std`` or ``|mean| > threshold``.

    The rule judges float inputs of modules with four dimensions (batch, channels, height, width). Mean and standard deviation are over
    all values of the recorded images. Learning is fastest with inputs of a mean close to zero (LeCun, Bottou, Orr and Müller, "Efficient
    BackProp", 1998, 4.3).

    SageMaker's CheckInputImages tests ``|mean| > 0.2`` of one channel, over 500 images: ``threshold: 0.2, ratio: null``. Whether 0.2 is
    large depends on the range of the images, 0 … 1 or 0 … 255; the ratio does not. Photographs that are not centered have a mean of about
    twice their standard deviation (ImageNet: 0.45 and 0.23), and digits on black about half (MNIST: 0.13 and 0.31), which does little
    harm. Means by channel are not recorded. Off by default, because a network with normalization also learns from such images.
    """

    name = "input_image_mean"
    summary = "input images are not centered at zero"
    needs = Needs(collections=("inputs",), roles=("input",))
    merge = "per_worker"
    usual_causes = (
        "Images are used as they were read, without subtracting the mean.",
        "Images are normalized with the mean and deviation of another data set, or of another range (0 … 1, 0 … 255).",
    )
    what_to_try = (
        "Subtract the mean of the training images, by channel, and divide by their deviation.",
        "Print mean and standard deviation of one batch as the model receives it.",
    )

    def evaluate(
        self, params: InputImageMeanParams, state: InputImageMeanState, context: Block, block: Block, now: int
    ) -> tuple[InputImageMeanState, list[Finding]]:
        """Judge all images of a series so far."""
        images = block.mask_of_tensors(
            [len(info.shape) == _IMAGES and "float" in info.dtype for info in block.catalogue]
        )
        rows = np.flatnonzero(images & (block.statistics.finite > 0))
        inputs, findings = dict(state.inputs), []
        key = block.series_key()[rows]
        for series in np.unique(key):
            own = rows[key == series]
            first = int(own[0])
            name = f"{block.info(first).name}@{block.worker[first]}/{block.mode_name(first)}"
            sums = _sums(block, own, inputs.get(name, ImageMoments()))
            inputs[name] = ImageMoments(*(float(column[-1]) for column in sums))
            findings += self._judge(params, block, own, sums)
        in_order = sorted(findings, key=itemgetter(0))
        return InputImageMeanState(inputs=inputs), [finding for _, finding in in_order]

    def _judge(
        self, params: InputImageMeanParams, block: Block, rows: NDArray[np.intp], sums: tuple[Floats, ...]
    ) -> list[tuple[int, Finding]]:
        images, values, total, squares = sums
        mean = np.abs(total / values)
        std = np.sqrt(np.maximum(squares / values - mean**2, 0))
        by_ratio = np.full(len(std), np.inf) if params.ratio is None else params.ratio * std
        limits = np.fmin(by_ratio, np.inf if params.threshold is None else params.threshold)
        findings = []
        for place in map(int, np.flatnonzero((images >= params.samples) & (mean > limits))):
            row = int(rows[place])
            message = (
                f"the {images[place]:.0f} images of {block.info(row).name} so far have a mean of "
                f"{total[place] / values[place]:.3g} and a standard deviation of {std[place]:.3g}"
            )
            findings.append(
                (
                    row,
                    finding_at(
                        self.name,
                        block,
                        row,
                        value=float(mean[place]),
                        threshold=float(limits[place]),
                        message=message,
                    ),
                )
            )
        return findings


def _sums(block: Block, rows: NDArray[np.intp], before: ImageMoments) -> tuple[Floats, ...]:
    """Cumulative moments at each row of a series: images, values, sum of the values and sum of their squares."""
    statistics = block.statistics
    values = statistics.finite[rows].astype(np.float64)
    image_size = prod(block.info(int(rows[0])).shape[1:]) or 1
    columns = (
        statistics.count[rows] / image_size,
        values,
        statistics.mean[rows] * values,
        statistics.square_sum[rows],
    )
    # Summed row by row, so that the result does not depend on the split into blocks.
    return tuple(
        np.cumsum(np.concatenate([[past], column]))[1:] for past, column in zip(before, columns, strict=True)
    )
