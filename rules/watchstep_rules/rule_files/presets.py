"""Presets of rule files, for ``preset: NAME``. ``sagemaker`` has the rules of Amazon SageMaker Debugger for users who migrate.

The SageMaker preset omits rules that judge nothing without parameters (TensorVariance, SimilarAcrossRuns), rules that never fire, and
the profiler's rules. `AMAZONS_RULES` names all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.registry import RULES
from watchstep_rules.rule import AnyRule

_LARGE_TENSORS = (
    "of tensors of over 16,384 elements, or where there are many, evenly spaced elements are compared"
)
_UNITS = "a unit is a feature, or a channel with all places of its image, and its activity that over the examples of one step"
_FUNCTIONS = "calls of a function in a model of which a part is compiled are not seen"
_BY_TYPE = "layers are found by type, not by Amazon's default expression"
_NEITHER = "Amazon refuses to run with neither `collection_names` nor `tensor_regex`"
_SAMPLED = "samples come in rows of ten seconds, which tell of so many of them on which side of a limit they surely are"


@dataclass(frozen=True)
class AmazonsRule:
    """One of Amazon's rules, and how near the rule here comes to its documentation.

    Attributes:
        name: Amazon's.
        rule: that here.
        how: what differs; empty where nothing does.
        in_preset: whether it judges where a rule file says no more than ``preset: sagemaker``.
    """

    name: str
    rule: str
    how: str = ""
    in_preset: bool = True

    @property
    def agreement(self) -> Literal["same", "differs"]:
        """Whether it decides as documented, on the same records."""
        return "differs" if self.how else "same"

    @property
    def implementation(self) -> AnyRule:
        """The rule here."""
        return RULES[self.rule]


AMAZONS_RULES: tuple[AmazonsRule, ...] = (
    AmazonsRule("VanishingGradient", "sagemaker_vanishing_gradient"),
    AmazonsRule("ExplodingTensor", "sagemaker_exploding_tensor"),
    AmazonsRule(
        "PoorWeightInitialization",
        "sagemaker_poor_weight_initialization",
        f"{_BY_TYPE}; of rectifiers that write over their input the outputs of weighted layers are taken; {_LARGE_TENSORS}",
    ),
    AmazonsRule(
        "SaturatedActivation", "sagemaker_saturated_activation", f"{_BY_TYPE}; {_UNITS}; {_FUNCTIONS}"
    ),
    AmazonsRule("DeadRelu", "sagemaker_dead_relu", f"{_BY_TYPE}; {_UNITS}; {_FUNCTIONS}"),
    AmazonsRule(
        "WeightUpdateRatio",
        "sagemaker_weight_update_ratio",
        f"the norm is Euclidean, Amazon's is unstated; {_LARGE_TENSORS}",
    ),
    AmazonsRule(
        "AllZero", "sagemaker_all_zero", f"{_NEITHER}; here weights, gradients, activations and inputs"
    ),
    AmazonsRule(
        "UnchangedTensor",
        "sagemaker_unchanged_tensor",
        f"each record is held against the one before; {_LARGE_TENSORS}; {_NEITHER}; here losses",
    ),
    AmazonsRule(
        "TensorVariance",
        "sagemaker_tensor_variance",
        f"{_NEITHER}; here weights, gradients and activations",
        in_preset=False,
    ),
    AmazonsRule("LossNotDecreasing", "sagemaker_loss_not_decreasing"),
    AmazonsRule("Overfit", "sagemaker_overfit", "the training loss is the newest at the evaluation's step"),
    AmazonsRule("Overtraining", "sagemaker_overtraining"),
    AmazonsRule(
        "SimilarAcrossRuns",
        "sagemaker_similar_across_runs",
        "Amazon's criterion is unstated; here the root mean square, within 1e-5; `other_trials` takes figures of the other run "
        "and not its address",
        in_preset=False,
    ),
    AmazonsRule(
        "StalledTrainingRule",
        "sagemaker_stalled_training",
        "to stop, give it `actions: [stop]`; a run knows its job, so the prefix has no effect; of the time between two looks of the "
        "service a third of the threshold counts at most",
    ),
    AmazonsRule(
        "ClassImbalance",
        "sagemaker_class_imbalance",
        "predictions are what is recorded as `predictions` or `outputs`, whatever `predictions_regex` says; of scores the largest is "
        "taken, whatever `argmax` says",
    ),
    AmazonsRule(
        "Confusion",
        "sagemaker_confusion",
        "the diagonal is divided by the sum of its column, for as printed the test cannot hold for several classes; up to 100 of them; "
        "names other than labels and predictions or outputs are refused",
    ),
    AmazonsRule(
        "CheckInputImages",
        "sagemaker_check_input_images",
        "images are found by their four dimensions, not by Amazon's default expression; up to four channels, each judged by itself",
    ),
    AmazonsRule(
        "NLPSequenceRatio",
        "sagemaker_nlp_sequence_ratio",
        "embeddings are found by type, not by Amazon's default expression",
    ),
    AmazonsRule("TreeDepth", "sagemaker_tree_depth"),
    AmazonsRule(
        "FeatureImportanceOverweight", "sagemaker_feature_importance_overweight", "`nfeatures` is 10 at most"
    ),
    AmazonsRule(
        "CreateXgboostReport",
        "sagemaker_create_xgboost_report",
        "it writes no report; it judges nothing at Amazon either",
        in_preset=False,
    ),
    AmazonsRule(
        "BatchSize",
        "sagemaker_batch_size",
        f"the window fades where Amazon's has an edge; {_SAMPLED}",
        in_preset=False,
    ),
    AmazonsRule("CPUBottleneck", "sagemaker_cpu_bottleneck", _SAMPLED, in_preset=False),
    AmazonsRule(
        "IOBottleneck",
        "sagemaker_io_bottleneck",
        f"the share of time in which a task waits for disks, where the kernel tells it, else of CPUs that wait; {_SAMPLED}",
        in_preset=False,
    ),
    AmazonsRule(
        "LowGPUUtilization",
        "sagemaker_low_gpu_utilization",
        f"the window fades where Amazon's has an edge; {_SAMPLED}",
        in_preset=False,
    ),
    AmazonsRule(
        "GPUMemoryIncrease",
        "sagemaker_gpu_memory_increase",
        "averages are of whole rows of twenty samples",
        in_preset=False,
    ),
    AmazonsRule(
        "LoadBalancing",
        "sagemaker_load_balancing",
        "Amazon's distance of histograms is unstated; here a share of the others' mean",
        in_preset=False,
    ),
    AmazonsRule(
        "StepOutlier",
        "sagemaker_step_outlier",
        "centre and spread are robust, of the last rows, and an outlier takes at least twice the centre; only steps of training are "
        "timed",
        in_preset=False,
    ),
    AmazonsRule("MaxInitializationTime", "sagemaker_max_initialization_time", in_preset=False),
    AmazonsRule(
        "Dataloader",
        "sagemaker_dataloader",
        "a program without processes that load data is left alone",
        in_preset=False,
    ),
    AmazonsRule(
        "OverallSystemUsage",
        "sagemaker_overall_system_usage",
        "it writes no report; it never fires at Amazon either",
        in_preset=False,
    ),
    AmazonsRule(
        "OverallFrameworkMetrics",
        "sagemaker_overall_framework_metrics",
        "it writes no report; it never fires at Amazon either",
        in_preset=False,
    ),
    AmazonsRule(
        "ProfilerReport",
        "sagemaker_profiler_report",
        "it writes no report; it fires when one of its rules does",
        in_preset=False,
    ),
)
"""All 33, in the order of Amazon's documentation: those of the debugger, then those of the profiler."""

SAGEMAKER: tuple[RuleConfig, ...] = tuple(
    RuleConfig(rule=one.rule, name=one.name) for one in AMAZONS_RULES if one.in_preset
)
"""None stops a job, as none of Amazon's does unless it is given an action."""


PRESETS: dict[str, tuple[RuleConfig, ...]] = {"sagemaker": SAGEMAKER}
