"""The handlers of the RPCs of `protocol.Journal`, one module for each."""
