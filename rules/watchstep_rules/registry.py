"""The rules by name."""

from __future__ import annotations

from watchstep.errors import RuleError
from watchstep_rules.absent_from_optimizer import AbsentFromOptimizer
from watchstep_rules.all_zero import AllZero
from watchstep_rules.batch_size import BatchSize
from watchstep_rules.class_imbalance import ClassImbalance
from watchstep_rules.confusion import Confusion
from watchstep_rules.contract import AnyRule
from watchstep_rules.cpu_bottleneck import CpuBottleneck
from watchstep_rules.data_loader import DataLoader
from watchstep_rules.dead_relu import DeadRelu
from watchstep_rules.exploding_gradient import ExplodingGradient
from watchstep_rules.feature_importance import FeatureImportance
from watchstep_rules.frozen_batch_norm import FrozenBatchNorm
from watchstep_rules.gpu_memory_increase import GpuMemoryIncrease
from watchstep_rules.gradient_norm_spike import GradientNormSpike
from watchstep_rules.gradients_cease import GradientsCease
from watchstep_rules.hyperparameter_jump import HyperparameterJump
from watchstep_rules.initialization_time import InitializationTime
from watchstep_rules.input_image_mean import InputImageMean
from watchstep_rules.io_bottleneck import IoBottleneck
from watchstep_rules.learning_rate_scale import LearningRateScale
from watchstep_rules.load_balance import LoadBalance
from watchstep_rules.loss_not_decreasing import LossNotDecreasing
from watchstep_rules.loss_spike import LossSpike
from watchstep_rules.lost_progress import LostProgress
from watchstep_rules.low_gpu_utilization import LowGpuUtilization
from watchstep_rules.memory_growth import MemoryGrowth
from watchstep_rules.missing_zero_grad import MissingZeroGrad
from watchstep_rules.nan_or_inf import NanOrInf
from watchstep_rules.non_finite_values import NonFiniteValues
from watchstep_rules.number_format_headroom import NumberFormatHeadroom
from watchstep_rules.optimizer_not_stepping import OptimizerNotStepping
from watchstep_rules.oscillating_loss import OscillatingLoss
from watchstep_rules.overfit import Overfit
from watchstep_rules.overtraining import Overtraining
from watchstep_rules.poor_initialization import PoorInitialization
from watchstep_rules.python_rule import Python
from watchstep_rules.replica_divergence import ReplicaDivergence
from watchstep_rules.running_statistics_frozen import RunningStatisticsFrozen
from watchstep_rules.sagemaker.all_zero import SagemakerAllZero
from watchstep_rules.sagemaker.check_input_images import SagemakerCheckInputImages
from watchstep_rules.sagemaker.class_imbalance import SagemakerClassImbalance
from watchstep_rules.sagemaker.confusion import SagemakerConfusion
from watchstep_rules.sagemaker.dead_relu import SagemakerDeadRelu
from watchstep_rules.sagemaker.exploding_tensor import SagemakerExplodingTensor
from watchstep_rules.sagemaker.feature_importance import SagemakerFeatureImportanceOverweight
from watchstep_rules.sagemaker.loss_not_decreasing import SagemakerLossNotDecreasing
from watchstep_rules.sagemaker.nlp_sequence_ratio import SagemakerNlpSequenceRatio
from watchstep_rules.sagemaker.overfit import SagemakerOverfit
from watchstep_rules.sagemaker.overtraining import SagemakerOvertraining
from watchstep_rules.sagemaker.poor_weight_initialization import SagemakerPoorWeightInitialization
from watchstep_rules.sagemaker.profiler import (
    SagemakerBatchSize,
    SagemakerCpuBottleneck,
    SagemakerDataloader,
    SagemakerGpuMemoryIncrease,
    SagemakerIoBottleneck,
    SagemakerLoadBalancing,
    SagemakerLowGpuUtilization,
    SagemakerMaxInitializationTime,
    SagemakerStepOutlier,
)
from watchstep_rules.sagemaker.profiler_report import SagemakerProfilerReport
from watchstep_rules.sagemaker.reports import (
    SagemakerCreateXgboostReport,
    SagemakerOverallFrameworkMetrics,
    SagemakerOverallSystemUsage,
)
from watchstep_rules.sagemaker.saturated_activation import SagemakerSaturatedActivation
from watchstep_rules.sagemaker.similar_across_runs import SagemakerSimilarAcrossRuns
from watchstep_rules.sagemaker.stalled_training import SagemakerStalledTraining
from watchstep_rules.sagemaker.tensor_variance import SagemakerTensorVariance
from watchstep_rules.sagemaker.tree_depth import SagemakerTreeDepth
from watchstep_rules.sagemaker.unchanged_tensor import SagemakerUnchangedTensor
from watchstep_rules.sagemaker.vanishing_gradient import SagemakerVanishingGradient
from watchstep_rules.sagemaker.weight_update_ratio import SagemakerWeightUpdateRatio
from watchstep_rules.saturated_activation import SaturatedActivation
from watchstep_rules.scaler_skips import ScalerSkips
from watchstep_rules.similar_across_runs import SimilarAcrossRuns
from watchstep_rules.slow_convergence import SlowConvergence
from watchstep_rules.sql_rule import Sql
from watchstep_rules.stalled_training import StalledTraining
from watchstep_rules.starved_expert import StarvedExpert
from watchstep_rules.step_outlier import StepOutlier
from watchstep_rules.symmetric_units import SymmetricUnits
from watchstep_rules.tensor_variance import TensorVariance
from watchstep_rules.token_ratio import TokenRatio
from watchstep_rules.tree_depth import TreeDepth
from watchstep_rules.unchanged_tensor import UnchangedTensor
from watchstep_rules.unlike_earlier_runs import UnlikeEarlierRuns
from watchstep_rules.validation_loss_jump import ValidationLossJump
from watchstep_rules.vanishing_gradient import VanishingGradient
from watchstep_rules.weight_not_updating import WeightNotUpdating
from watchstep_rules.weight_update_ratio import WeightUpdateRatio

RULES: dict[str, AnyRule] = {
    rule.name: rule
    for rule in (
        NanOrInf(),
        NonFiniteValues(),
        VanishingGradient(),
        ExplodingGradient(),
        DeadRelu(),
        LossNotDecreasing(),
        OscillatingLoss(),
        Overfit(),
        SlowConvergence(),
        SaturatedActivation(),
        PoorInitialization(),
        WeightNotUpdating(),
        ClassImbalance(),
        StalledTraining(),
        StarvedExpert(),
        AllZero(),
        UnchangedTensor(),
        TensorVariance(),
        WeightUpdateRatio(),
        Overtraining(),
        InputImageMean(),
        NumberFormatHeadroom(),
        LossSpike(),
        LostProgress(),
        ValidationLossJump(),
        GradientNormSpike(),
        ReplicaDivergence(),
        ScalerSkips(),
        LearningRateScale(),
        HyperparameterJump(),
        GradientsCease(),
        SimilarAcrossRuns(),
        UnlikeEarlierRuns(),
        MissingZeroGrad(),
        OptimizerNotStepping(),
        SymmetricUnits(),
        FrozenBatchNorm(),
        RunningStatisticsFrozen(),
        AbsentFromOptimizer(),
        Confusion(),
        TokenRatio(),
        TreeDepth(),
        FeatureImportance(),
        SagemakerAllZero(),
        SagemakerBatchSize(),
        SagemakerCheckInputImages(),
        SagemakerClassImbalance(),
        SagemakerConfusion(),
        SagemakerCpuBottleneck(),
        SagemakerCreateXgboostReport(),
        SagemakerDataloader(),
        SagemakerDeadRelu(),
        SagemakerExplodingTensor(),
        SagemakerFeatureImportanceOverweight(),
        SagemakerGpuMemoryIncrease(),
        SagemakerIoBottleneck(),
        SagemakerLoadBalancing(),
        SagemakerLossNotDecreasing(),
        SagemakerLowGpuUtilization(),
        SagemakerMaxInitializationTime(),
        SagemakerNlpSequenceRatio(),
        SagemakerOverallFrameworkMetrics(),
        SagemakerOverallSystemUsage(),
        SagemakerOverfit(),
        SagemakerOvertraining(),
        SagemakerPoorWeightInitialization(),
        SagemakerProfilerReport(),
        SagemakerSaturatedActivation(),
        SagemakerSimilarAcrossRuns(),
        SagemakerStalledTraining(),
        SagemakerStepOutlier(),
        SagemakerTensorVariance(),
        SagemakerTreeDepth(),
        SagemakerUnchangedTensor(),
        SagemakerVanishingGradient(),
        SagemakerWeightUpdateRatio(),
        BatchSize(),
        CpuBottleneck(),
        DataLoader(),
        GpuMemoryIncrease(),
        InitializationTime(),
        IoBottleneck(),
        LoadBalance(),
        LowGpuUtilization(),
        MemoryGrowth(),
        StepOutlier(),
    )
}

KINDS: dict[str, AnyRule] = {rule.name: rule for rule in (Sql(), Python())}
"""Rules that are what their parameters say: a query, a program. They judge nothing by themselves."""


def find_rule(name: str) -> AnyRule:
    """The rule, or kind of rule, of that name.

    Raises:
        RuleError: there is none.
    """
    rule = RULES.get(name) or KINDS.get(name)
    if rule is None:
        raise RuleError(f"unknown rule {name!r}", f"use one of: {', '.join(sorted({*RULES, *KINDS}))}")
    return rule
