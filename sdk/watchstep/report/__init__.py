"""The report of a run: one self-contained HTML file with what the run page shows."""

from __future__ import annotations

from watchstep.report.report_data import ReportedAlert, RunReport, collect_report
from watchstep.report.report_page import render_report, write_report

__all__ = ["ReportedAlert", "RunReport", "collect_report", "render_report", "write_report"]
