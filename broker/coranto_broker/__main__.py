"""`python -m coranto_broker serve …`."""

from coranto_broker.cli import app

app(prog_name="python -m coranto_broker")
