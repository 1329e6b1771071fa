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
_UNITS = "a unit is a feature, or a channel with all positions of its image, and its activity is over the examples of one step"
_FUNCTIONS = "function calls in a partly compiled model are not recorded"
_BY_TYPE = "layers are found by type, not by Amazon's default expression"
_NEITHER = "Amazon's rule does not run without `collection_names` and `tensor_regex`"
_SAMPLED = (
    "samples are aggregated in rows of ten seconds, and only samples that are certainly beyond a limit count"
)


@dataclass(frozen=True)
class AmazonsRule:
    """A rule of Amazon, and how the corresponding rule differs from its documentation.

    Attributes:
        name: Amazon's name.
        rule: the corresponding rule.
        how: the differences; empty if there are none.
        in_preset: whether the preset ``sagemaker`` includes it.
    """

    name: str
    rule: str
    how: str = ""
    in_preset: bool = True

    @property
    def agreement(self) -> Literal["same", "differs"]:
        """Whether the rule decides as documented, on the same records."""
        return "differs" if self.how else "same"

    @property
    def implementation(self) -> AnyRule:
        """The corresponding rule."""
        return RULES[self.rule]


AMAZONS_RULES: tuple[AmazonsRule, ...] = (
    AmazonsRule("VanishingGradient", "sagemaker_vanishing_gradient"),
    AmazonsRule("ExplodingTensor", "sagemaker_exploding_tensor"),
    AmazonsRule(
        "PoorWeightInitialization",
        "sagemaker_poor_weight_initialization",
        f"{_BY_TYPE}; for in-place rectifiers the outputs of weighted layers are used; {_LARGE_TENSORS}",
    ),
    AmazonsRule(
        "SaturatedActivation", "sagemaker_saturated_activation", f"{_BY_TYPE}; {_UNITS}; {_FUNCTIONS}"
    ),
    AmazonsRule("DeadRelu", "sagemaker_dead_relu", f"{_BY_TYPE}; {_UNITS}; {_FUNCTIONS}"),
    AmazonsRule(
        "WeightUpdateRatio",
        "sagemaker_weight_update_ratio",
        f"the norm is Euclidean, Amazon's is unstated; {_LARGE_TENSORS}; with `full_tensors` all elements are compared",
    ),
    AmazonsRule(
        "AllZero", "sagemaker_all_zero", f"{_NEITHER}; here weights, gradients, activations and inputs"
    ),
    AmazonsRule(
        "UnchangedTensor",
        "sagemaker_unchanged_tensor",
        f"each record is compared with the previous one; {_LARGE_TENSORS}; with `full_tensors` all elements are compared; {_NEITHER}; here losses",
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
        "Amazon's criterion is unstated; here the root mean square, within 1e-5, or with `elementwise` each element of saved tensors; "
        "`other_trials` takes the name of one run of the project, or its statistics, instead of a URL",
        in_preset=False,
    ),
    AmazonsRule(
        "StalledTrainingRule",
        "sagemaker_stalled_training",
        "to stop a job, add `actions: [stop]`; a run knows its job, so the prefix has no effect; of the time between two evaluations "
        "at most a third of the threshold counts",
    ),
    AmazonsRule(
        "ClassImbalance",
        "sagemaker_class_imbalance",
        "predictions are the recorded `predictions` or `outputs`, whatever `predictions_regex` is; of scores the largest is "
        "used, whatever `argmax` is",
    ),
    AmazonsRule(
        "Confusion",
        "sagemaker_confusion",
        "the diagonal is divided by the sum of its column, because the documented test cannot pass with several classes; up to 100 classes; "
        "names other than labels and predictions or outputs are rejected",
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
        "it writes no report, which `watchstep report` does; it judges nothing in SageMaker either",
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
        f"the share of time in which a task waits for disks, if the kernel reports it, else the share of CPUs that wait; {_SAMPLED}",
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
        "a program without data loading processes is not judged",
        in_preset=False,
    ),
    AmazonsRule(
        "OverallSystemUsage",
        "sagemaker_overall_system_usage",
        "it writes no report; it never fires in SageMaker either",
        in_preset=False,
    ),
    AmazonsRule(
        "OverallFrameworkMetrics",
        "sagemaker_overall_framework_metrics",
        "it writes no report; it never fires in SageMaker either",
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
    RuleConfig(rule=rule.rule, name=rule.name) for rule in AMAZONS_RULES if rule.in_preset
)
"""No rule stops a job, as in SageMaker without an action."""


PRESETS: dict[str, tuple[RuleConfig, ...]] = {"sagemaker": SAGEMAKER}
