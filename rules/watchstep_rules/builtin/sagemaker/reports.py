"""SageMaker rules that write a report: `ProfilerReport` runs all profiler rules; the others never fire."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from pydantic import Field, create_model, model_validator

from watchstep.format.block import Block
from watchstep_rules.builtin.sagemaker.parameters import AmazonParams, ScanInterval
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
from watchstep_rules.rule import AnyRule, Finding, Needs, Params, Rule, State


class SagemakerCreateXgboostReportParams(AmazonParams):
    """`SagemakerCreateXgboostReport` takes none."""

    amazon: ClassVar[str] = "CreateXgboostReport"


class SagemakerOverallSystemUsageParams(AmazonParams):
    """Parameters of `SagemakerOverallSystemUsage`."""

    amazon: ClassVar[str] = "OverallSystemUsage"
    scan_interval_us: ScanInterval


class SagemakerOverallFrameworkMetricsParams(AmazonParams):
    """Parameters of `SagemakerOverallFrameworkMetrics`."""

    amazon: ClassVar[str] = "OverallFrameworkMetrics"
    scan_interval_us: ScanInterval


AnyAmazonParams = TypeVar("AnyAmazonParams", bound=AmazonParams)


class _Report(Rule[AnyAmazonParams, State]):
    """Never fires, as at Amazon."""

    merge = "per_worker"
    usual_causes = ("it never fires",)
    what_to_try = ("read the run's figures instead",)

    def evaluate(
        self, params: AnyAmazonParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Return no findings."""
        return state, []


class SagemakerCreateXgboostReport(_Report[SagemakerCreateXgboostReportParams]):
    """Never fires: SageMaker's CreateXgboostReport writes a report. Here ``watchstep report`` writes it."""

    name = "sagemaker_create_xgboost_report"
    summary = "never: SageMaker writes a report of an XGBoost training"
    needs = Needs(("custom",), ("tree_depth",))


class SagemakerOverallSystemUsage(_Report[SagemakerOverallSystemUsageParams]):
    """Never fires: SageMaker's OverallSystemUsage aggregates figures of the machine. Here they are with the run, by minute."""

    name = "sagemaker_overall_system_usage"
    summary = "never: SageMaker aggregates figures of the machine"
    needs = Needs(("system",), ("system",))


class SagemakerOverallFrameworkMetrics(_Report[SagemakerOverallFrameworkMetricsParams]):
    """Never fires: SageMaker's OverallFrameworkMetrics aggregates times of the framework. Here step times are with the run."""

    name = "sagemaker_overall_framework_metrics"
    summary = "never: SageMaker aggregates times of the framework"
    needs = Needs(("system",), ("system",))


PARTS: dict[str, AnyRule] = {
    rule.params_type.amazon: rule
    for rule in (
        SagemakerBatchSize(),
        SagemakerCpuBottleneck(),
        SagemakerDataloader(),
        SagemakerGpuMemoryIncrease(),
        SagemakerIoBottleneck(),
        SagemakerLoadBalancing(),
        SagemakerLowGpuUtilization(),
        SagemakerMaxInitializationTime(),
        SagemakerStepOutlier(),
    )
}
"""The rules that a report runs, by their SageMaker names."""

_BY_LOWER = {name.lower(): name for name in PARTS}


class SagemakerProfilerReportParams(AmazonParams):
    """Parameters of `SagemakerProfilerReport`: besides this, those of its rules, as ``CPUBottleneck_threshold``."""

    amazon: ClassVar[str] = "ProfilerReport"
    opt_out_telemetry: bool = Field(
        False, description="Accepted and without effect: nothing is sent anywhere."
    )

    @model_validator(mode="before")
    @classmethod
    def _are_known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name if name in cls.model_fields else "_".join(_part_of(str(name))): value
            for name, value in data.items()
        }

    @property
    def parts(self) -> dict[str, Params]:
        """The parameters of each rule, by its SageMaker name."""
        values = self.model_dump()
        return {
            name: rule.params_type(
                **{field: values[f"{name}_{field}"] for field in rule.params_type.model_fields}
            )
            for name, rule in PARTS.items()
        }


_OF_PARTS: dict[str, Any] = {
    f"{name}_{parameter}": (field.annotation, field)
    for name, rule in PARTS.items()
    for parameter, field in rule.params_type.model_fields.items()
}

PROFILER_REPORT_PARAMS: type[SagemakerProfilerReportParams] = create_model(
    "SagemakerProfilerReportParams", __base__=SagemakerProfilerReportParams, **_OF_PARTS
)
"""`SagemakerProfilerReportParams` with a field for each parameter of each rule."""


class SagemakerProfilerReportState(State):
    """The states of its rules, by their SageMaker names."""

    parts: dict[str, dict[str, Any]] = Field(default_factory=dict)


class SagemakerProfilerReport(Rule[SagemakerProfilerReportParams, SagemakerProfilerReportState]):
    """Fires when one of the profiler's rules does, of which the message names the first words: SageMaker's ProfilerReport.

    Parameters of a rule go by ``RULE_PARAMETER``, as at Amazon. Amazon also writes a report in HTML; here figures of the process and its
    machine are with the run.
    """

    name = "sagemaker_profiler_report"
    summary = "one of the profiler's rules fires, in SageMaker's parameters"
    needs = Needs(("system",), ("system",), histograms=True)
    merge = "watermark"
    usual_causes = (
        "The machine waits for data, for a disk or for other ranks.",
        "Batches are small for the machine.",
        "Memory of a GPU grows.",
    )
    what_to_try = (
        "Read the message: it begins with the name of the profiler rule that fires.",
        "Configure that rule by itself for its own causes and advice.",
    )
    params_type = PROFILER_REPORT_PARAMS

    def lookback(self, params: SagemakerProfilerReportParams) -> int:
        """Return the longest lookback of its rules."""
        parts = params.parts
        return max(rule.lookback(parts[name]) for name, rule in PARTS.items())

    def evaluate(
        self,
        params: SagemakerProfilerReportParams,
        state: SagemakerProfilerReportState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SagemakerProfilerReportState, list[Finding]]:
        """Evaluate each rule."""
        parts, states, findings = params.parts, {}, []
        for name, rule in PARTS.items():
            before = rule.state_type.model_validate(state.parts.get(name, {}))
            after, rule_findings = rule.evaluate(parts[name], before, context, block, now)
            if after != rule.state_type():
                states[name] = after.model_dump(mode="json")
            findings += [
                finding.model_copy(update={"rule": self.name, "message": f"{name}: {finding.message}"})
                for finding in rule_findings
            ]
        findings.sort(key=lambda finding: (finding.step, finding.worker))
        return SagemakerProfilerReportState(parts=states), findings


def _part_of(name: str) -> tuple[str, str]:
    """Split a name into rule and parameter.

    Raises:
        ValueError: the rule or the parameter does not exist.
    """
    rule, _, parameter = name.partition("_")
    part = _BY_LOWER.get(rule.lower())
    if part is None or not parameter:
        raise ValueError(f"{name!r} is not of the form RULE_PARAMETER with one of {', '.join(PARTS)}")
    fields = PARTS[part].params_type.model_fields
    if parameter.lower() not in fields:
        raise ValueError(f"{part} has no parameter {parameter!r}; it takes {', '.join(fields)}")
    return part, parameter.lower()
