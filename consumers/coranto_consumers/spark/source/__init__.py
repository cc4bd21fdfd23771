"""`spark.read.format("journal")`: the data source, and reads that are no queries."""
