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
        "explosion_conv_of_bytes",
        "explosion_conv_rate_of_ten",
        "explosion_deep_wide_weights",
        "explosion_linear_recurrence",
        "explosion_one_bad_batch",
        "explosion_one_raw_column",
        "explosion_parabola_of_thousands",
        "explosion_rate_that_grows",
        "explosion_residual_without_norms",
        "explosion_summed_loss",
        "explosion_that_settles",
        "left_behind_bfloat16_weights",
        "left_behind_copied_model",
        "left_behind_exponential_decay",
        "left_behind_forgotten_group",
        "left_behind_integer_division",
        "left_behind_new_head",
        "left_behind_without_gradients",
        "loop_float16_adam",
        "loop_labels_of_other_examples",
        "loop_schedule_by_batch",
        "loop_sorted_by_class",
        "recurrent_relu_explodes",
        "small_steps_adagrad",
        "small_steps_averaged_twice",
        "small_steps_clipped",
        "small_steps_gated_recurrent",
        "small_steps_scaled_twice",
        "small_steps_transformer",
        "swings_across_the_ravine",
        "swings_batches_of_one",
        "swings_gradients_kept",
        "swings_gradients_kept_adam",
        "swings_momentum_and_rate",
        "swings_momentum_near_one",
        "swings_raw_wine",
        "swings_sorted_tokens",
        "weights_constant_convolutions",
        "weights_head_scaled_up",
        "weights_random_normal_everywhere",
        "weights_random_normal_softmax",
        "weights_tied_to_an_embedding",
        "weights_tiny_before_tanh",
        "weights_tiny_convolutions",
        "weights_uniform_autoencoder",
        "weights_zero_recurrent",
        # healthy
        "actor_and_critic",
        "adapter_between_layers",
        "autocast_bfloat16",
        "autoencoder_digits",
        "batches_of_two",
        "bytes_that_train",
        "encoder_every_tenth_step",
        "frozen_backbone",
        "gated_recurrent_waves",
        "harder_by_and_by",
        "head_alone_in_the_optimizer",
        "labels_turned_around",
        "later_half_in_the_optimizer",
        "linear_decay_of_noise",
        "moving_targets",
        "noisy_labels",
        "one_cycle",
        "one_regression_at_a_time",
        "prompt_alone",
        "rate_at_rest",
        "reinforced_walk",
        "scaled_down_loss",
        "small_policy_head",
        "small_weights_that_grow",
        "spike_and_recovery",
        "strong_decay",
        "thousands_by_small_rate",
        "twelve_examples",
    }
)


def programs() -> dict[str, Program]:
    """All of them by id."""
    return {**published.PROGRAMS, **healthy.PROGRAMS}


def part_of(name: str) -> Part:
    """The part a program belongs to."""
    return "tune" if name.removesuffix(FIXED) in TUNE else "held_out"
