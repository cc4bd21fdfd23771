"""Comparisons of two tables by key: what an application and its changed form have made of the same input."""

from coranto_consumers.comparison.compare import TableOf, compare_tables, table_at
from coranto_consumers.comparison.report import TableComparison

__all__ = ["TableComparison", "TableOf", "compare_tables", "table_at"]
