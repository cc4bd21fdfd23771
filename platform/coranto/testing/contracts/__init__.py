"""Contract tests for custom fragment stores and coordinators. For consumers' stores, see their package."""
