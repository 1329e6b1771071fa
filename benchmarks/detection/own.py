"""The project's own programs: published faults with their twins, and longer healthy trainings, in two parts.

Rules may be tuned on the part ``tune``. The figures that count are those of ``held_out``, which no threshold may be
fitted to. A twin belongs to the part of its faulty program. The two parts are fixed here, by name.
"""

from __future__ import annotations

from typing import Literal

from benchmarks.detection import healthy, published
from benchmarks.detection.programs import Program
from benchmarks.detection.published.pairs import FIXED

Part = Literal["tune", "held_out"]

TUNE = frozenset(
    {
        "attention_rate_without_warmup",
        "autoencoder_bounded_output",
        "conv_gradients_masked",
        "conv_many_sigmoids",
        "conv_slow_rate",
        "data_mostly_zeros",
        "data_overflowing_label",
        "data_wrong_labels_memorised",
        "dense_raw_pixels_rmsprop",
        "dense_tiny_features",
        "dense_uniform_positive_weights",
        "loop_float16_adam",
        "loop_labels_of_other_examples",
        "loop_schedule_by_batch",
        "loop_sorted_by_class",
        "recurrent_relu_explodes",
        # healthy
        "autocast_bfloat16",
        "autoencoder_digits",
        "frozen_backbone",
        "gated_recurrent_waves",
        "noisy_labels",
        "one_cycle",
        "reinforced_walk",
        "twelve_examples",
    }
)


def programs() -> dict[str, Program]:
    """All of them by id."""
    return {**published.PROGRAMS, **healthy.PROGRAMS}


def part_of(name: str) -> Part:
    """The part a program belongs to."""
    return "tune" if name.removesuffix(FIXED) in TUNE else "held_out"
