"""The built-in rules of Amazon SageMaker Debugger with Amazon's names, parameters and semantics, for those who migrate.

Half of a tensor "or more" is more than half in Amazon's words; a share just above one half says so where the rule here asks
for at least that. Left out are rules that fire for nothing unless they are told what to look for (TensorVariance,
SimilarAcrossRuns), and the profiler's.
"""

from __future__ import annotations

from watchstep_rules.config import RuleConfig, TensorScope

_MORE_THAN_HALF = 0.5 + 1e-9

SAGEMAKER: tuple[RuleConfig, ...] = (
    RuleConfig(rule="sagemaker_vanishing_gradient", name="VanishingGradient"),
    RuleConfig(rule="nan_or_inf", name="ExplodingTensor", params={"allow_negative_infinity_in": []}),
    RuleConfig(rule="sagemaker_poor_weight_initialization", name="PoorWeightInitialization"),
    RuleConfig(
        rule="saturated_activation",
        name="SaturatedActivation",
        # The share of channels alone: no slope, no records in a row, whatever the loss.
        params={
            "slope": 1e-12,
            "share": _MORE_THAN_HALF,
            "steps": 1,
            "examples": 1,
            "converged": 0.0,
            "stuck": 0.0,
        },
    ),
    RuleConfig(
        rule="dead_relu",
        name="DeadRelu",
        params={
            "share": _MORE_THAN_HALF,
            "silent_share": _MORE_THAN_HALF,
            "steps": 1,
            "examples": 1,
            "converged": 0.0,
        },
    ),
    RuleConfig(
        rule="weight_update_ratio",
        name="WeightUpdateRatio",
        params={"min_dimensions": 0},
        tensors=TensorScope(include=r".*weight"),
    ),
    RuleConfig(rule="all_zero", name="AllZero"),
    RuleConfig(rule="unchanged_tensor", name="UnchangedTensor", tensors=TensorScope(collection="losses")),
    RuleConfig(rule="sagemaker_loss_not_decreasing", name="LossNotDecreasing"),
    RuleConfig(rule="sagemaker_overfit", name="Overfit"),
    RuleConfig(
        rule="overtraining",
        name="Overtraining",
        params={"patience_train": 5, "patience_validation": 10, "as_share": False, "window": 1},
    ),
    RuleConfig(rule="stalled_training", name="StalledTrainingRule", params={"patience": 1.0}),
    RuleConfig(rule="sagemaker_class_imbalance", name="ClassImbalance"),
    RuleConfig(
        rule="class_imbalance",
        name="ClassImbalance.misprediction",
        # The other half of Amazon's rule alone: no labels are out of balance by this ratio.
        params={"ratio": 1e12, "misprediction": 0.7, "examples": 1},
    ),
    RuleConfig(rule="confusion", name="Confusion", params={"examples": 1}),
    RuleConfig(rule="token_ratio", name="NLPSequenceRatio", params={"window": 1}),
    RuleConfig(
        rule="input_image_mean",
        name="CheckInputImages",
        params={"ratio": None, "threshold": 0.2, "samples": 500},
    ),
    RuleConfig(rule="tree_depth", name="TreeDepth"),
    RuleConfig(rule="feature_importance", name="FeatureImportanceOverweight"),
)
"""None stops a job, as none of Amazon's does unless it is given an action."""
