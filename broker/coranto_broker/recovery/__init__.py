"""After a restart or a loss: in-sync records, spools taken up or orphaned, deleted journals, restored etcds."""
