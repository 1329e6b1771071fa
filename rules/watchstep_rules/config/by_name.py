"""Every built-in rule as a function of its parameters: ``nan_or_inf().stop()``."""

from __future__ import annotations

from watchstep_rules.builtin.activations.dead_relu import DeadReluParams
from watchstep_rules.builtin.activations.frozen_batch_norm import (
    FrozenBatchNormParams,
    RunningStatisticsFrozenParams,
)
from watchstep_rules.builtin.activations.representation_collapse import RepresentationCollapseParams
from watchstep_rules.builtin.activations.saturated_activation import SaturatedActivationParams
from watchstep_rules.builtin.activations.starved_expert import StarvedExpertParams
from watchstep_rules.builtin.data.class_imbalance import ClassImbalanceParams
from watchstep_rules.builtin.data.confusion import ConfusionParams
from watchstep_rules.builtin.data.input_image_mean import InputImageMeanParams
from watchstep_rules.builtin.data.token_ratio import TokenRatioParams
from watchstep_rules.builtin.data.trees import FeatureImportanceParams, TreeDepthParams
from watchstep_rules.builtin.gradients.exploding_gradient import ExplodingGradientParams
from watchstep_rules.builtin.gradients.gradient_norm_spike import GradientNormSpikeParams
from watchstep_rules.builtin.gradients.gradients_cease import GradientsCeaseParams
from watchstep_rules.builtin.gradients.missing_zero_grad import MissingZeroGradParams
from watchstep_rules.builtin.gradients.mixed_precision import NumberFormatHeadroomParams, ScalerSkipsParams
from watchstep_rules.builtin.gradients.nan_or_inf import NanOrInfParams
from watchstep_rules.builtin.gradients.non_finite_values import NonFiniteValuesParams
from watchstep_rules.builtin.gradients.recompute_mismatch import RecomputeMismatchParams
from watchstep_rules.builtin.gradients.vanishing_gradient import VanishingGradientParams
from watchstep_rules.builtin.losses.invalid_objective import InvalidObjectiveParams
from watchstep_rules.builtin.losses.loss_not_decreasing import LossNotDecreasingParams
from watchstep_rules.builtin.losses.loss_spike import LossSpikeParams
from watchstep_rules.builtin.losses.lost_progress import LostProgressParams
from watchstep_rules.builtin.losses.oscillating_loss import OscillatingLossParams
from watchstep_rules.builtin.losses.overfit import OverfitParams
from watchstep_rules.builtin.losses.overtraining import OvertrainingParams
from watchstep_rules.builtin.losses.slow_convergence import SlowConvergenceParams
from watchstep_rules.builtin.losses.validation_loss_jump import ValidationLossJumpParams
from watchstep_rules.builtin.sagemaker.data import (
    SagemakerCheckInputImagesParams,
    SagemakerClassImbalanceParams,
    SagemakerConfusionParams,
    SagemakerNlpSequenceRatioParams,
)
from watchstep_rules.builtin.sagemaker.layers import (
    SagemakerDeadReluParams,
    SagemakerPoorWeightInitializationParams,
    SagemakerSaturatedActivationParams,
    SagemakerWeightUpdateRatioParams,
)
from watchstep_rules.builtin.sagemaker.losses import (
    SagemakerLossNotDecreasingParams,
    SagemakerOverfitParams,
    SagemakerOvertrainingParams,
    SagemakerStalledTrainingParams,
)
from watchstep_rules.builtin.sagemaker.profiler import (
    SagemakerBatchSizeParams,
    SagemakerCpuBottleneckParams,
    SagemakerDataloaderParams,
    SagemakerGpuMemoryIncreaseParams,
    SagemakerIoBottleneckParams,
    SagemakerLoadBalancingParams,
    SagemakerLowGpuUtilizationParams,
    SagemakerMaxInitializationTimeParams,
    SagemakerStepOutlierParams,
)
from watchstep_rules.builtin.sagemaker.reports import (
    PROFILER_REPORT_PARAMS,
    SagemakerCreateXgboostReportParams,
    SagemakerOverallFrameworkMetricsParams,
    SagemakerOverallSystemUsageParams,
)
from watchstep_rules.builtin.sagemaker.tensors import (
    SagemakerAllZeroParams,
    SagemakerExplodingTensorParams,
    SagemakerSimilarAcrossRunsParams,
    SagemakerTensorVarianceParams,
    SagemakerUnchangedTensorParams,
    SagemakerVanishingGradientParams,
)
from watchstep_rules.builtin.sagemaker.trees import (
    SagemakerFeatureImportanceOverweightParams,
    SagemakerTreeDepthParams,
)
from watchstep_rules.builtin.system.batch_size import BatchSizeParams
from watchstep_rules.builtin.system.data_loader import DataLoaderParams
from watchstep_rules.builtin.system.idle_gpu import CpuBottleneckParams, IoBottleneckParams
from watchstep_rules.builtin.system.initialization_time import InitializationTimeParams
from watchstep_rules.builtin.system.load_balance import LoadBalanceParams
from watchstep_rules.builtin.system.low_gpu_utilization import LowGpuUtilizationParams
from watchstep_rules.builtin.system.memory_growth import GpuMemoryIncreaseParams, MemoryGrowthParams
from watchstep_rules.builtin.system.stalled_training import StalledTrainingParams
from watchstep_rules.builtin.system.step_outlier import StepOutlierParams
from watchstep_rules.builtin.system.training_hangs import TrainingHangsParams
from watchstep_rules.builtin.tensors.all_zero import AllZeroParams
from watchstep_rules.builtin.tensors.similar_across_runs import SimilarAcrossRunsParams
from watchstep_rules.builtin.tensors.tensor_variance import TensorVarianceParams
from watchstep_rules.builtin.tensors.unchanged_tensor import UnchangedTensorParams
from watchstep_rules.builtin.tensors.unlike_earlier_runs import UnlikeEarlierRunsParams
from watchstep_rules.builtin.weights.absent_from_optimizer import AbsentFromOptimizerParams
from watchstep_rules.builtin.weights.hyperparameter_jump import HyperparameterJumpParams
from watchstep_rules.builtin.weights.learning_rate_scale import LearningRateScaleParams
from watchstep_rules.builtin.weights.optimizer_not_stepping import OptimizerNotSteppingParams
from watchstep_rules.builtin.weights.poor_initialization import PoorInitializationParams
from watchstep_rules.builtin.weights.replica_divergence import ReplicaDivergenceParams
from watchstep_rules.builtin.weights.resume_mismatch import ResumeMismatchParams
from watchstep_rules.builtin.weights.symmetric_units import SymmetricUnitsParams
from watchstep_rules.builtin.weights.weight_not_updating import WeightNotUpdatingParams
from watchstep_rules.builtin.weights.weight_update_ratio import WeightUpdateRatioParams
from watchstep_rules.config.attached import attachable
from watchstep_rules.rule import Params

absent_from_optimizer = attachable("absent_from_optimizer", AbsentFromOptimizerParams)
all_zero = attachable("all_zero", AllZeroParams)
batch_size = attachable("batch_size", BatchSizeParams)
class_imbalance = attachable("class_imbalance", ClassImbalanceParams)
confusion = attachable("confusion", ConfusionParams)
cpu_bottleneck = attachable("cpu_bottleneck", CpuBottleneckParams)
data_loader = attachable("data_loader", DataLoaderParams)
dead_relu = attachable("dead_relu", DeadReluParams)
exploding_gradient = attachable("exploding_gradient", ExplodingGradientParams)
feature_importance = attachable("feature_importance", FeatureImportanceParams)
frozen_batch_norm = attachable("frozen_batch_norm", FrozenBatchNormParams)
running_statistics_frozen = attachable("running_statistics_frozen", RunningStatisticsFrozenParams)
gpu_memory_increase = attachable("gpu_memory_increase", GpuMemoryIncreaseParams)
gradient_norm_spike = attachable("gradient_norm_spike", GradientNormSpikeParams)
gradients_cease = attachable("gradients_cease", GradientsCeaseParams)
hyperparameter_jump = attachable("hyperparameter_jump", HyperparameterJumpParams)
resume_mismatch = attachable("resume_mismatch", ResumeMismatchParams)
initialization_time = attachable("initialization_time", InitializationTimeParams)
input_image_mean = attachable("input_image_mean", InputImageMeanParams)
io_bottleneck = attachable("io_bottleneck", IoBottleneckParams)
learning_rate_scale = attachable("learning_rate_scale", LearningRateScaleParams)
load_balance = attachable("load_balance", LoadBalanceParams)
invalid_objective = attachable("invalid_objective", InvalidObjectiveParams)
loss_not_decreasing = attachable("loss_not_decreasing", LossNotDecreasingParams)
loss_spike = attachable("loss_spike", LossSpikeParams)
lost_progress = attachable("lost_progress", LostProgressParams)
low_gpu_utilization = attachable("low_gpu_utilization", LowGpuUtilizationParams)
memory_growth = attachable("memory_growth", MemoryGrowthParams)
missing_zero_grad = attachable("missing_zero_grad", MissingZeroGradParams)
recompute_mismatch = attachable("recompute_mismatch", RecomputeMismatchParams)
optimizer_not_stepping = attachable("optimizer_not_stepping", OptimizerNotSteppingParams)
nan_or_inf = attachable("nan_or_inf", NanOrInfParams)
non_finite_values = attachable("non_finite_values", NonFiniteValuesParams)
number_format_headroom = attachable("number_format_headroom", NumberFormatHeadroomParams)
oscillating_loss = attachable("oscillating_loss", OscillatingLossParams)
overfit = attachable("overfit", OverfitParams)
overtraining = attachable("overtraining", OvertrainingParams)
poor_initialization = attachable("poor_initialization", PoorInitializationParams)
replica_divergence = attachable("replica_divergence", ReplicaDivergenceParams)
representation_collapse = attachable("representation_collapse", RepresentationCollapseParams)
sagemaker_all_zero = attachable("sagemaker_all_zero", SagemakerAllZeroParams)
sagemaker_batch_size = attachable("sagemaker_batch_size", SagemakerBatchSizeParams)
sagemaker_check_input_images = attachable("sagemaker_check_input_images", SagemakerCheckInputImagesParams)
sagemaker_class_imbalance = attachable("sagemaker_class_imbalance", SagemakerClassImbalanceParams)
sagemaker_confusion = attachable("sagemaker_confusion", SagemakerConfusionParams)
sagemaker_cpu_bottleneck = attachable("sagemaker_cpu_bottleneck", SagemakerCpuBottleneckParams)
sagemaker_create_xgboost_report = attachable(
    "sagemaker_create_xgboost_report", SagemakerCreateXgboostReportParams
)
sagemaker_dataloader = attachable("sagemaker_dataloader", SagemakerDataloaderParams)
sagemaker_dead_relu = attachable("sagemaker_dead_relu", SagemakerDeadReluParams)
sagemaker_exploding_tensor = attachable("sagemaker_exploding_tensor", SagemakerExplodingTensorParams)
sagemaker_feature_importance_overweight = attachable(
    "sagemaker_feature_importance_overweight", SagemakerFeatureImportanceOverweightParams
)
sagemaker_gpu_memory_increase = attachable("sagemaker_gpu_memory_increase", SagemakerGpuMemoryIncreaseParams)
sagemaker_io_bottleneck = attachable("sagemaker_io_bottleneck", SagemakerIoBottleneckParams)
sagemaker_load_balancing = attachable("sagemaker_load_balancing", SagemakerLoadBalancingParams)
sagemaker_loss_not_decreasing = attachable("sagemaker_loss_not_decreasing", SagemakerLossNotDecreasingParams)
sagemaker_low_gpu_utilization = attachable("sagemaker_low_gpu_utilization", SagemakerLowGpuUtilizationParams)
sagemaker_max_initialization_time = attachable(
    "sagemaker_max_initialization_time", SagemakerMaxInitializationTimeParams
)
sagemaker_nlp_sequence_ratio = attachable("sagemaker_nlp_sequence_ratio", SagemakerNlpSequenceRatioParams)
sagemaker_overall_framework_metrics = attachable(
    "sagemaker_overall_framework_metrics", SagemakerOverallFrameworkMetricsParams
)
sagemaker_overall_system_usage = attachable(
    "sagemaker_overall_system_usage", SagemakerOverallSystemUsageParams
)
sagemaker_overfit = attachable("sagemaker_overfit", SagemakerOverfitParams)
sagemaker_overtraining = attachable("sagemaker_overtraining", SagemakerOvertrainingParams)
sagemaker_poor_weight_initialization = attachable(
    "sagemaker_poor_weight_initialization", SagemakerPoorWeightInitializationParams
)
sagemaker_profiler_report = attachable("sagemaker_profiler_report", PROFILER_REPORT_PARAMS)
sagemaker_saturated_activation = attachable(
    "sagemaker_saturated_activation", SagemakerSaturatedActivationParams
)
sagemaker_similar_across_runs = attachable("sagemaker_similar_across_runs", SagemakerSimilarAcrossRunsParams)
sagemaker_stalled_training = attachable("sagemaker_stalled_training", SagemakerStalledTrainingParams)
sagemaker_step_outlier = attachable("sagemaker_step_outlier", SagemakerStepOutlierParams)
sagemaker_tensor_variance = attachable("sagemaker_tensor_variance", SagemakerTensorVarianceParams)
sagemaker_tree_depth = attachable("sagemaker_tree_depth", SagemakerTreeDepthParams)
sagemaker_unchanged_tensor = attachable("sagemaker_unchanged_tensor", SagemakerUnchangedTensorParams)
sagemaker_vanishing_gradient = attachable("sagemaker_vanishing_gradient", SagemakerVanishingGradientParams)
sagemaker_weight_update_ratio = attachable("sagemaker_weight_update_ratio", SagemakerWeightUpdateRatioParams)
saturated_activation = attachable("saturated_activation", SaturatedActivationParams)
scaler_skips = attachable("scaler_skips", ScalerSkipsParams)
similar_across_runs = attachable("similar_across_runs", SimilarAcrossRunsParams)
skipped_updates = attachable("skipped_updates", Params)
slow_convergence = attachable("slow_convergence", SlowConvergenceParams)
stalled_training = attachable("stalled_training", StalledTrainingParams)
starved_expert = attachable("starved_expert", StarvedExpertParams)
step_outlier = attachable("step_outlier", StepOutlierParams)
symmetric_units = attachable("symmetric_units", SymmetricUnitsParams)
tensor_variance = attachable("tensor_variance", TensorVarianceParams)
token_ratio = attachable("token_ratio", TokenRatioParams)
training_hangs = attachable("training_hangs", TrainingHangsParams)
training_stopped = attachable("training_stopped", Params)
tree_depth = attachable("tree_depth", TreeDepthParams)
unchanged_tensor = attachable("unchanged_tensor", UnchangedTensorParams)
unlike_earlier_runs = attachable("unlike_earlier_runs", UnlikeEarlierRunsParams)
validation_loss_jump = attachable("validation_loss_jump", ValidationLossJumpParams)
vanishing_gradient = attachable("vanishing_gradient", VanishingGradientParams)
weight_not_updating = attachable("weight_not_updating", WeightNotUpdatingParams)
weight_update_ratio = attachable("weight_update_ratio", WeightUpdateRatioParams)

__all__ = [
    "absent_from_optimizer",
    "all_zero",
    "batch_size",
    "class_imbalance",
    "confusion",
    "cpu_bottleneck",
    "data_loader",
    "dead_relu",
    "exploding_gradient",
    "feature_importance",
    "frozen_batch_norm",
    "gpu_memory_increase",
    "gradient_norm_spike",
    "gradients_cease",
    "hyperparameter_jump",
    "initialization_time",
    "input_image_mean",
    "invalid_objective",
    "io_bottleneck",
    "learning_rate_scale",
    "load_balance",
    "loss_not_decreasing",
    "loss_spike",
    "lost_progress",
    "low_gpu_utilization",
    "memory_growth",
    "missing_zero_grad",
    "nan_or_inf",
    "non_finite_values",
    "number_format_headroom",
    "optimizer_not_stepping",
    "oscillating_loss",
    "overfit",
    "overtraining",
    "poor_initialization",
    "recompute_mismatch",
    "replica_divergence",
    "representation_collapse",
    "resume_mismatch",
    "running_statistics_frozen",
    "sagemaker_all_zero",
    "sagemaker_batch_size",
    "sagemaker_check_input_images",
    "sagemaker_class_imbalance",
    "sagemaker_confusion",
    "sagemaker_cpu_bottleneck",
    "sagemaker_create_xgboost_report",
    "sagemaker_dataloader",
    "sagemaker_dead_relu",
    "sagemaker_exploding_tensor",
    "sagemaker_feature_importance_overweight",
    "sagemaker_gpu_memory_increase",
    "sagemaker_io_bottleneck",
    "sagemaker_load_balancing",
    "sagemaker_loss_not_decreasing",
    "sagemaker_low_gpu_utilization",
    "sagemaker_max_initialization_time",
    "sagemaker_nlp_sequence_ratio",
    "sagemaker_overall_framework_metrics",
    "sagemaker_overall_system_usage",
    "sagemaker_overfit",
    "sagemaker_overtraining",
    "sagemaker_poor_weight_initialization",
    "sagemaker_profiler_report",
    "sagemaker_saturated_activation",
    "sagemaker_similar_across_runs",
    "sagemaker_stalled_training",
    "sagemaker_step_outlier",
    "sagemaker_tensor_variance",
    "sagemaker_tree_depth",
    "sagemaker_unchanged_tensor",
    "sagemaker_vanishing_gradient",
    "sagemaker_weight_update_ratio",
    "saturated_activation",
    "scaler_skips",
    "similar_across_runs",
    "skipped_updates",
    "slow_convergence",
    "stalled_training",
    "starved_expert",
    "step_outlier",
    "symmetric_units",
    "tensor_variance",
    "token_ratio",
    "training_hangs",
    "training_stopped",
    "tree_depth",
    "unchanged_tensor",
    "unlike_earlier_runs",
    "validation_loss_jump",
    "vanishing_gradient",
    "weight_not_updating",
    "weight_update_ratio",
]
