"""`spark.readStream.format("journal")`: options, offsets, the plan of each micro-batch, and the reader."""
