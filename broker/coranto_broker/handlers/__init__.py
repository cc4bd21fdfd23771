"""The handlers of a broker's RPCs, one module for each, and their common parts."""
