"""`coranto login`: the login of a user at an OpenID Connect provider."""

from __future__ import annotations

import os

import typer

from coranto.cli.output import printable
from coranto.client.config import oidc_client_of
from coranto.client.loop import shared_loop
from coranto.errors import InvalidInput
from coranto.extras import require


def login() -> None:
    """Log in at the OpenID Connect provider $CORANTO_OIDC_ISSUER as its client $CORANTO_OIDC_CLIENT_ID.

    Later commands of this user then use tokens of the provider. They are in a file that only this user can read.
    """
    client = oidc_client_of(os.environ)
    if client.secret is not None:
        raise InvalidInput("is set: commands get tokens by it, without a login", field="$CORANTO_OIDC_CLIENT_SECRET")
    require("oidc", "oauthlib")
    from coranto.security.oidc.login import log_in

    def show(url: str, code: str) -> None:
        typer.echo(f"Open {printable(url)} in a browser, and enter the code {printable(code)}", err=True)

    path = shared_loop().run(log_in(client, show))
    typer.echo(f"You are logged in at {client.issuer}. The tokens are in {path}: remove it to log out.", err=True)
