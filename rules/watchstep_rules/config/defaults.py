"""The default rules, which evaluate a run without rules of its own."""

from __future__ import annotations

from watchstep_rules.config.rule_config import KeepFiring, MinimumDuration, RuleConfig, StopAction

_FOLLOW_FROM_NAN = (
    "exploding_gradient",
    "vanishing_gradient",
    "dead_relu",
    "saturated_activation",
    "weight_not_updating",
    "invalid_objective",
    "loss_not_decreasing",
    "slow_convergence",
    "oscillating_loss",
    "overfit",
    "unlike_earlier_runs",
)
"""Rules about magnitudes and progress: at a step with NaN or infinity their findings add nothing."""

_LOSSES = KeepFiring(steps=100)
"""The patience of rules about losses: afterwards their windows contain none of the losses that they fired for."""
_LAYERS = KeepFiring(steps=10)
"""Records of a layer or parameter. Values near a threshold cross it often, and one fault should be one alert."""
_VALUES = KeepFiring(steps=50)
"""A single finite loss among hundreds that are not finite does not end an episode."""

DEFAULT_RULES: tuple[RuleConfig, ...] = (
    RuleConfig(
        rule="nan_or_inf",
        severity="critical",
        actions=(StopAction(),),
        inhibits=("non_finite_values", *_FOLLOW_FROM_NAN),
    ),
    RuleConfig(
        rule="non_finite_values",
        params={"whole_steps": True},
        severity="warning",
        hold=MinimumDuration(steps=2),
        keep_firing=_VALUES,
        inhibits=_FOLLOW_FROM_NAN,
    ),
    RuleConfig(rule="exploding_gradient", severity="warning", hold=MinimumDuration(steps=2)),
    RuleConfig(
        rule="vanishing_gradient", severity="warning", hold=MinimumDuration(steps=3), keep_firing=_LAYERS
    ),
    RuleConfig(rule="dead_relu", severity="warning", keep_firing=_LAYERS),
    RuleConfig(rule="saturated_activation", severity="warning", keep_firing=_LAYERS),
    RuleConfig(rule="poor_initialization", severity="warning"),
    RuleConfig(
        rule="weight_not_updating",
        severity="warning",
        hold=MinimumDuration(steps=3),
        keep_firing=_LAYERS,
        inhibits=("absent_from_optimizer",),
    ),
    RuleConfig(rule="class_imbalance", severity="info"),
    RuleConfig(
        rule="loss_not_decreasing", severity="warning", hold=MinimumDuration(steps=5), keep_firing=_LOSSES
    ),
    RuleConfig(
        rule="invalid_objective", severity="warning", hold=MinimumDuration(steps=3), keep_firing=_LOSSES
    ),
    RuleConfig(
        rule="slow_convergence", severity="warning", hold=MinimumDuration(steps=5), keep_firing=_LOSSES
    ),
    RuleConfig(
        rule="oscillating_loss", severity="warning", hold=MinimumDuration(steps=3), keep_firing=_LOSSES
    ),
    RuleConfig(rule="loss_spike", severity="warning", keep_firing=_LOSSES),
    RuleConfig(rule="lost_progress", severity="warning", hold=MinimumDuration(steps=3), keep_firing=_LOSSES),
    RuleConfig(rule="validation_loss_jump", severity="warning"),
    RuleConfig(rule="overfit", severity="warning", hold=MinimumDuration(steps=2)),
    RuleConfig(rule="replica_divergence", severity="critical"),
    RuleConfig(rule="scaler_skips", severity="warning"),
    RuleConfig(rule="skipped_updates", severity="info"),
    RuleConfig(rule="frozen_batch_norm", severity="warning"),
    RuleConfig(rule="running_statistics_frozen", severity="info"),
    RuleConfig(rule="starved_expert", severity="info", keep_firing=_LAYERS),
    RuleConfig(rule="representation_collapse", severity="warning", keep_firing=_LAYERS),
    RuleConfig(rule="symmetric_units", severity="warning"),
    RuleConfig(rule="missing_zero_grad", severity="warning"),
    RuleConfig(rule="recompute_mismatch", severity="warning"),
    RuleConfig(rule="optimizer_not_stepping", severity="warning"),
    RuleConfig(
        rule="unlike_earlier_runs", severity="warning", hold=MinimumDuration(steps=5), keep_firing=_LAYERS
    ),
    RuleConfig(rule="absent_from_optimizer", severity="warning"),
    RuleConfig(rule="gradients_cease", severity="warning", keep_firing=_LAYERS),
    RuleConfig(rule="hyperparameter_jump", severity="warning", keep_firing=_LAYERS),
    RuleConfig(rule="resume_mismatch", severity="warning", keep_firing=_LOSSES),
    RuleConfig(rule="training_hangs", severity="warning"),
    RuleConfig(rule="training_stopped", severity="critical"),
)
"""Only damage stops a job by default: a training does not recover from NaN in its parameters."""

_MACHINE = (
    "it concerns the machine, not the training: a small model, a busy laptop or a slow disk is not a fault"
)
_AMAZONS = "Amazon's criterion, for the preset sagemaker"

OFF_BY_DEFAULT: dict[str, str] = {
    "stalled_training": "a healthy program may pause for any time",
    "all_zero": "biases, branches and adapters may start at zero",
    "unchanged_tensor": "it fires on inputs of a training on one batch, and on frozen weights",
    "tensor_variance": "needs bounds",
    "weight_update_ratio": "it fires on a schedule that ends at zero, and on weights that start tiny",
    "overtraining": "it fires on a training that has converged",
    "input_image_mean": "a network with normalization learns from such images",
    "number_format_headroom": "it assesses a number format, whatever format the training uses",
    "gradient_norm_spike": "it fires on small batches, which clipping handles",
    "learning_rate_scale": "it fires on fine-tuning with several learning rates",
    "similar_across_runs": "needs a reference",
    "low_gpu_utilization": _MACHINE,
    "batch_size": _MACHINE,
    "cpu_bottleneck": _MACHINE,
    "io_bottleneck": _MACHINE,
    "gpu_memory_increase": _MACHINE,
    "memory_growth": _MACHINE,
    "load_balance": _MACHINE,
    "step_outlier": _MACHINE,
    "initialization_time": _MACHINE,
    "data_loader": _MACHINE,
    "confusion": "an untrained model confuses all classes",
    "token_ratio": "padding is not a fault",
    "tree_depth": "deep trees may be wanted",
    "feature_importance": "one feature may explain it all",
    "sagemaker_all_zero": _AMAZONS,
    "sagemaker_batch_size": _AMAZONS,
    "sagemaker_check_input_images": _AMAZONS,
    "sagemaker_class_imbalance": _AMAZONS,
    "sagemaker_confusion": _AMAZONS,
    "sagemaker_cpu_bottleneck": _AMAZONS,
    "sagemaker_create_xgboost_report": _AMAZONS,
    "sagemaker_dataloader": _AMAZONS,
    "sagemaker_dead_relu": _AMAZONS,
    "sagemaker_exploding_tensor": _AMAZONS,
    "sagemaker_feature_importance_overweight": _AMAZONS,
    "sagemaker_gpu_memory_increase": _AMAZONS,
    "sagemaker_io_bottleneck": _AMAZONS,
    "sagemaker_load_balancing": _AMAZONS,
    "sagemaker_loss_not_decreasing": _AMAZONS,
    "sagemaker_low_gpu_utilization": _AMAZONS,
    "sagemaker_max_initialization_time": _AMAZONS,
    "sagemaker_nlp_sequence_ratio": _AMAZONS,
    "sagemaker_overall_framework_metrics": _AMAZONS,
    "sagemaker_overall_system_usage": _AMAZONS,
    "sagemaker_overfit": _AMAZONS,
    "sagemaker_overtraining": _AMAZONS,
    "sagemaker_poor_weight_initialization": _AMAZONS,
    "sagemaker_profiler_report": _AMAZONS,
    "sagemaker_saturated_activation": _AMAZONS,
    "sagemaker_similar_across_runs": _AMAZONS,
    "sagemaker_stalled_training": _AMAZONS,
    "sagemaker_step_outlier": _AMAZONS,
    "sagemaker_tensor_variance": _AMAZONS,
    "sagemaker_tree_depth": _AMAZONS,
    "sagemaker_unchanged_tensor": _AMAZONS,
    "sagemaker_vanishing_gradient": _AMAZONS,
    "sagemaker_weight_update_ratio": _AMAZONS,
}
"""Rules that are off by default, and why: each would fire on some healthy training."""
