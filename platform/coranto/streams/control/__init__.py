"""The lifecycle of streams: creation, scaling, transaction decisions and deletion."""
