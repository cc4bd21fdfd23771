"""Resources: clusters of brokers, SQL stores and Spark, with their secrets kept out of what Dagster shows."""
