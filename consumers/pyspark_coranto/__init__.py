"""Makes `spark.read.format("journal")` known to Spark, which looks into packages named `pyspark_*` for data sources."""

from coranto_consumers.spark.source.data_source import JournalDataSource as DefaultSource

__all__ = ["DefaultSource"]
