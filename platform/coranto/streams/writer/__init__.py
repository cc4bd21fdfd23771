"""Writing a stream: events, and transactions on one key or several."""
