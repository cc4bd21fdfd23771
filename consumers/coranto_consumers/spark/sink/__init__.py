"""`write.format("journal")` and `writeStream`: rows as messages, published once, whatever is tried how often."""
