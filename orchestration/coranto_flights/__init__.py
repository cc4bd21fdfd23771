"""The flights that left New York in 2013, from a CSV file through journals and Spark into a table. No orchestrator."""
