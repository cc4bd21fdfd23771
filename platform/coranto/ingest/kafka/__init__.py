"""Topics of Kafka as a source. Needs the extra `kafka`."""
