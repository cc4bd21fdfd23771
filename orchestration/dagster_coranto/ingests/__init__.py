"""Ingests as assets: the stream that an ingest writes, with its lag and a check of its freshness."""
