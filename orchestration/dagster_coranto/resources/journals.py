"""The cluster resource of assets, checks and sensors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import dagster as dg
from pydantic import Field, field_validator

from coranto.client import ClientConfig, JournalClient, SyncJournalClient
from coranto.client.groups import JournalGroup
from coranto.client.heads import Heads
from coranto.client.loop import run_blocking
from coranto.client.positions import JournalPosition, positions_of
from coranto.cluster import resolve_client_config
from coranto.cluster.info import DATA_VARIABLE, DEFAULT_DATA_DIR
from coranto.fragments.stores import StoreRegistry
from coranto.names import check_prefix
from dagster_coranto.resources.hidden import hide, reveal

AUDIT_RETRY_TIMEOUT_S = 5.0
"""The retry timeout in seconds of audits for one broker. An unavailable broker may have many journals."""


class JournalResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # its value is itself
    """A cluster of brokers.

    Without an endpoint, the embedded cluster below `data_dir` is looked up for each client, because its ports change
    with each start.

    Values of empty fields come from the environment of the process that uses the resource, as for commands. Give
    secrets as `dg.EnvVar("…")`; Dagster then shows the variable's name. A literal secret shows as `hidden`.
    """

    endpoint: str = Field(
        default="",
        description="Brokers, as host:port or a URL; several are separated by commas. Empty: $CORANTO_ENDPOINT, "
        "otherwise the cluster below data_dir.",
    )
    file_root: str = Field(
        default="",
        description="Root folder of file:/// fragment stores, if readable here. Empty: $CORANTO_FILE_ROOT with an "
        "endpoint, otherwise the embedded cluster's.",
    )
    data_dir: str = Field(
        default="", description="Folder of an embedded cluster. Empty: $CORANTO_DATA, otherwise ./.coranto."
    )
    prefix: str = Field(
        default="",
        description="Prefix of every journal name in assets (such as 'rerun/'), so that the same assets can run over "
        "another set of journals.",
    )

    zone: str = Field(
        default="", description="Zone of this process, whose brokers are read from first. Empty: $CORANTO_ZONE."
    )
    auth_token: str = Field(
        default="", repr=False, description="A bearer token for brokers. Empty: $CORANTO_AUTH_TOKEN."
    )
    auth_keys: str = Field(
        default="",
        repr=False,
        description="Keys to sign tokens with, as base64, separated by commas. Empty: $CORANTO_AUTH_KEYS.",
    )
    oidc_issuer: str = Field(
        default="",
        description="URL of an OpenID Connect provider that issues tokens. Empty: $CORANTO_OIDC_ISSUER.",
    )
    oidc_client_id: str = Field(
        default="", description="Id that the provider has given to this client. Empty: $CORANTO_OIDC_CLIENT_ID."
    )
    oidc_client_secret: str = Field(
        default="", repr=False, description="Secret of this client. Empty: $CORANTO_OIDC_CLIENT_SECRET."
    )
    oidc_scope: str = Field(default="", description="Scope of the tokens to request. Empty: $CORANTO_OIDC_SCOPE.")
    oidc_audience: str = Field(
        default="", description="Audience of the tokens to request. Empty: $CORANTO_OIDC_AUDIENCE."
    )
    tls_ca: str = Field(
        default="", description="PEM file of the authorities to trust, for https endpoints. Empty: $CORANTO_TLS_CA."
    )
    tls_cert: str = Field(
        default="", description="PEM file of the client certificate for brokers. Empty: $CORANTO_TLS_CERT."
    )
    tls_key: str = Field(default="", description="PEM file of the certificate's key. Empty: $CORANTO_TLS_KEY.")

    @field_validator("auth_token", "auth_keys", "oidc_client_secret", mode="before")
    @classmethod
    def _hide(cls, value: object) -> object:
        return hide(value) if isinstance(value, str) else value

    def client_config(self) -> ClientConfig:
        """Return the configuration of a client for the cluster.

        Raises ClusterError without an endpoint and a running embedded cluster, and InvalidInput for invalid settings.
        """
        settings = {
            "CORANTO_AUTH_TOKEN": reveal(self.auth_token),
            "CORANTO_AUTH_KEYS": reveal(self.auth_keys),
            "CORANTO_OIDC_ISSUER": self.oidc_issuer,
            "CORANTO_OIDC_CLIENT_ID": self.oidc_client_id,
            "CORANTO_OIDC_CLIENT_SECRET": reveal(self.oidc_client_secret),
            "CORANTO_OIDC_SCOPE": self.oidc_scope,
            "CORANTO_OIDC_AUDIENCE": self.oidc_audience,
            "CORANTO_ZONE": self.zone,
            "CORANTO_TLS_CA": self.tls_ca,
            "CORANTO_TLS_CERT": self.tls_cert,
            "CORANTO_TLS_KEY": self.tls_key,
        }
        return resolve_client_config(self.endpoint, data_dir=self.data_dir, file_root=self.file_root, settings=settings)

    def audit_config(self) -> ClientConfig:
        """Return `client_config` with a short retry timeout, for callers that report unavailable brokers."""
        config = self.client_config()
        return replace(config, retry_timeout=min(config.retry_timeout, AUDIT_RETRY_TIMEOUT_S))

    def located_data_dir(self) -> Path:
        """Return the folder of the embedded cluster, which need not run."""
        return Path(self.data_dir or os.environ.get(DATA_VARIABLE) or DEFAULT_DATA_DIR)

    def client(self) -> SyncJournalClient:
        """Return a client of the cluster. Close it, or use it as a context manager."""
        return SyncJournalClient.of(self.client_config())

    def stores(self) -> StoreRegistry:
        """Return the fragment stores, by the names that the cluster's brokers use."""
        return StoreRegistry(self.client_config().file_root)

    def name(self, name: str) -> str:
        """Return a journal's full name, with the prefix."""
        return check_prefix(self.prefix) + name

    def group(self, group: JournalGroup) -> JournalGroup:
        """Return a group below this resource's prefix."""
        return group.under(self.prefix)

    def positions(self, group: JournalGroup) -> dict[str, JournalPosition]:
        """Return the positions of a group's journals, by full name and in the group's order. The prefix applies.

        Raises Unavailable when the head of one of them is unknown.
        """
        return positions_of(self.heads(group).all_known())

    def heads(self, group: JournalGroup) -> Heads:
        """Return the heads of a group's journals, by one call. The prefix applies."""
        return run_blocking(self._heads(self.group(group)))

    async def _heads(self, group: JournalGroup) -> Heads:
        async with JournalClient.of(self.client_config()) as client:
            return await client.heads(group.selector)
