"""Reading a stream in one process."""
