"""Names of Amazon's that write a report and judge nothing, so that rule files keep them."""

from __future__ import annotations

from typing import ClassVar

from watchstep.format.block import Block
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams, ScanInterval
from watchstep_rules.rule import Finding, Needs, Rule, State


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


class ReportState(State):
    """Nothing."""


class _Report(Rule[AmazonParams, ReportState]):
    """Never fires, as at Amazon."""

    merge = "per_worker"
    usual_causes = ("it never fires",)
    what_to_try = ("read the run's figures instead",)
    state_type = ReportState

    def evaluate(
        self,
        params: AmazonParams,  # noqa: ARG002 - the contract's
        state: ReportState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,  # noqa: ARG002 - the contract's
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[ReportState, list[Finding]]:
        """Judge nothing."""
        return state, []


class SagemakerCreateXgboostReport(_Report):
    """Never fires: SageMaker's CreateXgboostReport writes a report. Here losses and figures of trees are with the run."""

    name = "sagemaker_create_xgboost_report"
    summary = "never: SageMaker writes a report of an XGBoost training"
    needs = Needs(("custom",), ("tree_depth",))
    params_type = SagemakerCreateXgboostReportParams


class SagemakerOverallSystemUsage(_Report):
    """Never fires: SageMaker's OverallSystemUsage aggregates figures of the machine. Here they are with the run, by minute."""

    name = "sagemaker_overall_system_usage"
    summary = "never: SageMaker aggregates figures of the machine"
    needs = Needs(("system",), ("system",))
    params_type = SagemakerOverallSystemUsageParams


class SagemakerOverallFrameworkMetrics(_Report):
    """Never fires: SageMaker's OverallFrameworkMetrics aggregates times of the framework. Here step times are with the run."""

    name = "sagemaker_overall_framework_metrics"
    summary = "never: SageMaker aggregates times of the framework"
    needs = Needs(("system",), ("system",))
    params_type = SagemakerOverallFrameworkMetricsParams
