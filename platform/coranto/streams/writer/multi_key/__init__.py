"""Multi-key transactions: transactions on several routing keys."""
