"""The report of a day: one HTML file that opens anywhere, CSV files and a summary in JSON beside it."""

from analytics.report.page import write

__all__ = ["write"]
