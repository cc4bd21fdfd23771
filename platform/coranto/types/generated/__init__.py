"""Generated code; see `tools/generate_blocking.py`."""
