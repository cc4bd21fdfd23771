"""Recovery after a restart or a loss: in-sync records, spools, deleted journals, and an etcd that was restored."""
