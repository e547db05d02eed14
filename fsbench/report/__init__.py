"""From records to what a person looks at: tables and figures as pure functions of a data frame."""

from fsbench.report.load import load
from fsbench.report.tables import Column, Table, Unit, summary, write

__all__ = ["Column", "Table", "Unit", "load", "summary", "write"]
