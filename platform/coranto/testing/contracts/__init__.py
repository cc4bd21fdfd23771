"""Contract tests for custom fragment stores and coordinators. The consumers' package has those for its stores."""
