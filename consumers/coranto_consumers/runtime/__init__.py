"""The consumer runtime: shards, assigned to processes, that process each message exactly once."""

from coranto.extras import require

require("consumers", "sqlalchemy", "numpy")
