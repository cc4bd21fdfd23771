"""What long-lived processes share: locks on their data directories, and memory settings."""
