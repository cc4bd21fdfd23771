"""`python -m coranto_broker serve …`."""

from coranto_broker.server.cli import app

app(prog_name="python -m coranto_broker")
