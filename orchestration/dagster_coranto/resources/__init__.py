"""Resources: clusters of brokers, SQL stores and Spark, with hidden secrets."""
