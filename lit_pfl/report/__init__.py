"""Runs as a page to read and as pictures for papers; what it shows is read from the files in their folders."""

from lit_pfl.report.numbers import Metric, main_metric
from lit_pfl.report.runs import Group, Run, check, grouped
from lit_pfl.report.tables import paired, paired_by_state, summary, validated

__all__ = [
    "Group", "Metric", "Run", "check", "grouped", "main_metric", "paired", "paired_by_state", "summary", "validated",
]  # fmt: skip
