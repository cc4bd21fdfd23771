"""Comparison of two tables by key, such as the results of an application and a changed version on the same input."""

from coranto_consumers.comparison.compare import TableOf, compare_tables, table_at
from coranto_consumers.comparison.report import TableComparison

__all__ = ["TableComparison", "TableOf", "compare_tables", "table_at"]
