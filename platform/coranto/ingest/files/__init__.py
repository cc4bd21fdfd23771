"""Files in a folder or bucket as a source."""
