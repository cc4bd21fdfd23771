"""Makes `spark.read.format("coranto")` known to Spark, which knows one data source of each package `pyspark_*`."""

from coranto_consumers.spark.source.data_source import CorantoDataSource as DefaultSource

__all__ = ["DefaultSource"]
