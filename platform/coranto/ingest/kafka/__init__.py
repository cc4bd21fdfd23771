"""Kafka topics as a source. Needs the extra `kafka`."""
