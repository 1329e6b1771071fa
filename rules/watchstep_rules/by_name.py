"""Every built-in rule by its name, as a function of its parameters: ``nan_or_inf().stop()``."""

from __future__ import annotations

from watchstep_rules.absent_from_optimizer import AbsentFromOptimizerParams
from watchstep_rules.all_zero import AllZeroParams
from watchstep_rules.attached import attachable
from watchstep_rules.batch_size import BatchSizeParams
from watchstep_rules.class_imbalance import ClassImbalanceParams
from watchstep_rules.confusion import ConfusionParams
from watchstep_rules.cpu_bottleneck import CpuBottleneckParams
from watchstep_rules.data_loader import DataLoaderParams
from watchstep_rules.dead_relu import DeadReluParams
from watchstep_rules.exploding_gradient import ExplodingGradientParams
from watchstep_rules.feature_importance import FeatureImportanceParams
from watchstep_rules.frozen_batch_norm import FrozenBatchNormParams
from watchstep_rules.gpu_memory_increase import GpuMemoryIncreaseParams
from watchstep_rules.gradient_norm_spike import GradientNormSpikeParams
from watchstep_rules.initialization_time import InitializationTimeParams
from watchstep_rules.input_image_mean import InputImageMeanParams
from watchstep_rules.io_bottleneck import IoBottleneckParams
from watchstep_rules.learning_rate_scale import LearningRateScaleParams
from watchstep_rules.load_balance import LoadBalanceParams
from watchstep_rules.loss_not_decreasing import LossNotDecreasingParams
from watchstep_rules.loss_spike import LossSpikeParams
from watchstep_rules.low_gpu_utilization import LowGpuUtilizationParams
from watchstep_rules.memory_growth import MemoryGrowthParams
from watchstep_rules.missing_zero_grad import MissingZeroGradParams
from watchstep_rules.nan_or_inf import NanOrInfParams
from watchstep_rules.number_format_headroom import NumberFormatHeadroomParams
from watchstep_rules.oscillating_loss import OscillatingLossParams
from watchstep_rules.overfit import OverfitParams
from watchstep_rules.overtraining import OvertrainingParams
from watchstep_rules.poor_initialization import PoorInitializationParams
from watchstep_rules.replica_divergence import ReplicaDivergenceParams
from watchstep_rules.sagemaker.class_imbalance import SagemakerClassImbalanceParams
from watchstep_rules.sagemaker.loss_not_decreasing import SagemakerLossNotDecreasingParams
from watchstep_rules.sagemaker.overfit import SagemakerOverfitParams
from watchstep_rules.sagemaker.poor_weight_initialization import SagemakerPoorWeightInitializationParams
from watchstep_rules.sagemaker.vanishing_gradient import SagemakerVanishingGradientParams
from watchstep_rules.saturated_activation import SaturatedActivationParams
from watchstep_rules.scaler_skips import ScalerSkipsParams
from watchstep_rules.similar_across_runs import SimilarAcrossRunsParams
from watchstep_rules.slow_convergence import SlowConvergenceParams
from watchstep_rules.stalled_training import StalledTrainingParams
from watchstep_rules.step_outlier import StepOutlierParams
from watchstep_rules.symmetric_units import SymmetricUnitsParams
from watchstep_rules.tensor_variance import TensorVarianceParams
from watchstep_rules.token_ratio import TokenRatioParams
from watchstep_rules.tree_depth import TreeDepthParams
from watchstep_rules.unchanged_tensor import UnchangedTensorParams
from watchstep_rules.vanishing_gradient import VanishingGradientParams
from watchstep_rules.weight_not_updating import WeightNotUpdatingParams
from watchstep_rules.weight_update_ratio import WeightUpdateRatioParams

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
gpu_memory_increase = attachable("gpu_memory_increase", GpuMemoryIncreaseParams)
gradient_norm_spike = attachable("gradient_norm_spike", GradientNormSpikeParams)
initialization_time = attachable("initialization_time", InitializationTimeParams)
input_image_mean = attachable("input_image_mean", InputImageMeanParams)
io_bottleneck = attachable("io_bottleneck", IoBottleneckParams)
learning_rate_scale = attachable("learning_rate_scale", LearningRateScaleParams)
load_balance = attachable("load_balance", LoadBalanceParams)
loss_not_decreasing = attachable("loss_not_decreasing", LossNotDecreasingParams)
loss_spike = attachable("loss_spike", LossSpikeParams)
low_gpu_utilization = attachable("low_gpu_utilization", LowGpuUtilizationParams)
memory_growth = attachable("memory_growth", MemoryGrowthParams)
missing_zero_grad = attachable("missing_zero_grad", MissingZeroGradParams)
nan_or_inf = attachable("nan_or_inf", NanOrInfParams)
number_format_headroom = attachable("number_format_headroom", NumberFormatHeadroomParams)
oscillating_loss = attachable("oscillating_loss", OscillatingLossParams)
overfit = attachable("overfit", OverfitParams)
overtraining = attachable("overtraining", OvertrainingParams)
poor_initialization = attachable("poor_initialization", PoorInitializationParams)
replica_divergence = attachable("replica_divergence", ReplicaDivergenceParams)
sagemaker_class_imbalance = attachable("sagemaker_class_imbalance", SagemakerClassImbalanceParams)
sagemaker_loss_not_decreasing = attachable("sagemaker_loss_not_decreasing", SagemakerLossNotDecreasingParams)
sagemaker_overfit = attachable("sagemaker_overfit", SagemakerOverfitParams)
sagemaker_poor_weight_initialization = attachable(
    "sagemaker_poor_weight_initialization", SagemakerPoorWeightInitializationParams
)
sagemaker_vanishing_gradient = attachable("sagemaker_vanishing_gradient", SagemakerVanishingGradientParams)
saturated_activation = attachable("saturated_activation", SaturatedActivationParams)
scaler_skips = attachable("scaler_skips", ScalerSkipsParams)
similar_across_runs = attachable("similar_across_runs", SimilarAcrossRunsParams)
slow_convergence = attachable("slow_convergence", SlowConvergenceParams)
stalled_training = attachable("stalled_training", StalledTrainingParams)
step_outlier = attachable("step_outlier", StepOutlierParams)
symmetric_units = attachable("symmetric_units", SymmetricUnitsParams)
tensor_variance = attachable("tensor_variance", TensorVarianceParams)
token_ratio = attachable("token_ratio", TokenRatioParams)
tree_depth = attachable("tree_depth", TreeDepthParams)
unchanged_tensor = attachable("unchanged_tensor", UnchangedTensorParams)
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
    "initialization_time",
    "input_image_mean",
    "io_bottleneck",
    "learning_rate_scale",
    "load_balance",
    "loss_not_decreasing",
    "loss_spike",
    "low_gpu_utilization",
    "memory_growth",
    "missing_zero_grad",
    "nan_or_inf",
    "number_format_headroom",
    "oscillating_loss",
    "overfit",
    "overtraining",
    "poor_initialization",
    "replica_divergence",
    "sagemaker_class_imbalance",
    "sagemaker_loss_not_decreasing",
    "sagemaker_overfit",
    "sagemaker_poor_weight_initialization",
    "sagemaker_vanishing_gradient",
    "saturated_activation",
    "scaler_skips",
    "similar_across_runs",
    "slow_convergence",
    "stalled_training",
    "step_outlier",
    "symmetric_units",
    "tensor_variance",
    "token_ratio",
    "tree_depth",
    "unchanged_tensor",
    "vanishing_gradient",
    "weight_not_updating",
    "weight_update_ratio",
]
