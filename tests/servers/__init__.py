"""Real servers and processes for tests: etcd, S3, databases, and processes that tests kill, pause and restart."""
