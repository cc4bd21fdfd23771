"""The append: receiving it, the queue of its journal, batches, the decision, the state machine, and the response."""
