"""A broker's HTTP endpoints: journals (`gateway`), and its own condition (`operation`)."""
