"""The life of streams: creation, scaling, decisions and deletion."""
