"""What a broker serves over HTTP: journals (`gateway`), and its own condition (`operation`)."""
