"""The append: its decision, its state machine, group commit, the fast path, and receiving content."""
