"""`spark.read.format("journal")`: the data source, and batch reads."""
