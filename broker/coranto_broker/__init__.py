"""The journal broker. Start it with `coranto broker serve`; other packages reach it through the client only."""

from coranto.extras import require

require("broker", "aiohttp")
