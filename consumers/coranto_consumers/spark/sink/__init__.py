"""`write.format("journal")` and `writeStream`: rows are published as messages exactly once, whatever is retried."""
