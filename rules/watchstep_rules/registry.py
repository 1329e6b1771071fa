"""The rules by name."""

from __future__ import annotations

from watchstep.errors import RuleError
from watchstep_rules.builtin.activations.dead_relu import DeadRelu
from watchstep_rules.builtin.activations.frozen_batch_norm import FrozenBatchNorm, RunningStatisticsFrozen
from watchstep_rules.builtin.activations.representation_collapse import RepresentationCollapse
from watchstep_rules.builtin.activations.saturated_activation import SaturatedActivation
from watchstep_rules.builtin.activations.starved_expert import StarvedExpert
from watchstep_rules.builtin.data.class_imbalance import ClassImbalance
from watchstep_rules.builtin.data.confusion import Confusion
from watchstep_rules.builtin.data.input_image_mean import InputImageMean
from watchstep_rules.builtin.data.token_ratio import TokenRatio
from watchstep_rules.builtin.data.trees import FeatureImportance, TreeDepth
from watchstep_rules.builtin.gradients.exploding_gradient import ExplodingGradient
from watchstep_rules.builtin.gradients.gate_policy import SkippedUpdates, TrainingStopped
from watchstep_rules.builtin.gradients.gradient_norm_spike import GradientNormSpike
from watchstep_rules.builtin.gradients.gradients_cease import GradientsCease
from watchstep_rules.builtin.gradients.missing_zero_grad import MissingZeroGrad
from watchstep_rules.builtin.gradients.mixed_precision import NumberFormatHeadroom, ScalerSkips
from watchstep_rules.builtin.gradients.nan_or_inf import NanOrInf
from watchstep_rules.builtin.gradients.non_finite_values import NonFiniteValues
from watchstep_rules.builtin.gradients.recompute_mismatch import RecomputeMismatch
from watchstep_rules.builtin.gradients.vanishing_gradient import VanishingGradient
from watchstep_rules.builtin.losses.invalid_objective import InvalidObjective
from watchstep_rules.builtin.losses.loss_not_decreasing import LossNotDecreasing
from watchstep_rules.builtin.losses.loss_spike import LossSpike
from watchstep_rules.builtin.losses.lost_progress import LostProgress
from watchstep_rules.builtin.losses.oscillating_loss import OscillatingLoss
from watchstep_rules.builtin.losses.overfit import Overfit
from watchstep_rules.builtin.losses.overtraining import Overtraining
from watchstep_rules.builtin.losses.slow_convergence import SlowConvergence
from watchstep_rules.builtin.losses.validation_loss_jump import ValidationLossJump
from watchstep_rules.builtin.sagemaker.data import (
    SagemakerCheckInputImages,
    SagemakerClassImbalance,
    SagemakerConfusion,
    SagemakerNlpSequenceRatio,
)
from watchstep_rules.builtin.sagemaker.layers import (
    SagemakerDeadRelu,
    SagemakerPoorWeightInitialization,
    SagemakerSaturatedActivation,
    SagemakerWeightUpdateRatio,
)
from watchstep_rules.builtin.sagemaker.losses import (
    SagemakerLossNotDecreasing,
    SagemakerOverfit,
    SagemakerOvertraining,
    SagemakerStalledTraining,
)
from watchstep_rules.builtin.sagemaker.profiler import (
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
from watchstep_rules.builtin.sagemaker.reports import (
    SagemakerCreateXgboostReport,
    SagemakerOverallFrameworkMetrics,
    SagemakerOverallSystemUsage,
    SagemakerProfilerReport,
)
from watchstep_rules.builtin.sagemaker.tensors import (
    SagemakerAllZero,
    SagemakerExplodingTensor,
    SagemakerSimilarAcrossRuns,
    SagemakerTensorVariance,
    SagemakerUnchangedTensor,
    SagemakerVanishingGradient,
)
from watchstep_rules.builtin.sagemaker.trees import SagemakerFeatureImportanceOverweight, SagemakerTreeDepth
from watchstep_rules.builtin.system.batch_size import BatchSize
from watchstep_rules.builtin.system.data_loader import DataLoader
from watchstep_rules.builtin.system.idle_gpu import CpuBottleneck, IoBottleneck
from watchstep_rules.builtin.system.initialization_time import InitializationTime
from watchstep_rules.builtin.system.load_balance import LoadBalance
from watchstep_rules.builtin.system.low_gpu_utilization import LowGpuUtilization
from watchstep_rules.builtin.system.memory_growth import GpuMemoryIncrease, MemoryGrowth
from watchstep_rules.builtin.system.stalled_training import StalledTraining
from watchstep_rules.builtin.system.step_outlier import StepOutlier
from watchstep_rules.builtin.system.training_hangs import TrainingHangs
from watchstep_rules.builtin.tensors.all_zero import AllZero
from watchstep_rules.builtin.tensors.similar_across_runs import SimilarAcrossRuns
from watchstep_rules.builtin.tensors.tensor_variance import TensorVariance
from watchstep_rules.builtin.tensors.unchanged_tensor import UnchangedTensor
from watchstep_rules.builtin.tensors.unlike_earlier_runs import UnlikeEarlierRuns
from watchstep_rules.builtin.weights.absent_from_optimizer import AbsentFromOptimizer
from watchstep_rules.builtin.weights.hyperparameter_jump import HyperparameterJump
from watchstep_rules.builtin.weights.learning_rate_scale import LearningRateScale
from watchstep_rules.builtin.weights.optimizer_not_stepping import OptimizerNotStepping
from watchstep_rules.builtin.weights.poor_initialization import PoorInitialization
from watchstep_rules.builtin.weights.replica_divergence import ReplicaDivergence
from watchstep_rules.builtin.weights.resume_mismatch import ResumeMismatch
from watchstep_rules.builtin.weights.symmetric_units import SymmetricUnits
from watchstep_rules.builtin.weights.weight_not_updating import WeightNotUpdating
from watchstep_rules.builtin.weights.weight_update_ratio import WeightUpdateRatio
from watchstep_rules.custom.python_rule import Python
from watchstep_rules.custom.sql.rule import Sql
from watchstep_rules.rule import AnyRule

RULES: dict[str, AnyRule] = {
    rule.name: rule
    for rule in (
        NanOrInf(),
        NonFiniteValues(),
        VanishingGradient(),
        ExplodingGradient(),
        DeadRelu(),
        LossNotDecreasing(),
        InvalidObjective(),
        OscillatingLoss(),
        Overfit(),
        SlowConvergence(),
        SaturatedActivation(),
        PoorInitialization(),
        WeightNotUpdating(),
        ClassImbalance(),
        StalledTraining(),
        TrainingHangs(),
        TrainingStopped(),
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
        SkippedUpdates(),
        LearningRateScale(),
        HyperparameterJump(),
        ResumeMismatch(),
        GradientsCease(),
        RepresentationCollapse(),
        SimilarAcrossRuns(),
        UnlikeEarlierRuns(),
        MissingZeroGrad(),
        RecomputeMismatch(),
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
"""Kinds of custom rules, which are defined by their parameters: a query or a program."""


def find_rule(name: str) -> AnyRule:
    """The rule, or kind of custom rule, with a name.

    Raises:
        RuleError: no rule has this name.
    """
    rule = RULES.get(name) or KINDS.get(name)
    if rule is None:
        raise RuleError(f"unknown rule {name!r}", f"use one of: {', '.join(sorted({*RULES, *KINDS}))}")
    return rule
