"""The flights pipeline without an orchestrator: from a CSV file through journals and Spark into a table."""
