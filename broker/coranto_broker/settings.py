"""The settings of a broker process: their names, limits and descriptions, in one place.

The command line options, the environment variables (CORANTO_BROKER_<NAME>), the keys of a configuration file and the
table in docs/operations.md all come from here. `coranto_broker.server.configuration` defines which of them wins.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from coranto_broker.spool.durable_spool import Fsync


class BrokerSettings(BaseSettings):
    """The settings of one broker. Sizes are in bytes, times in seconds, rates in bytes per second."""

    model_config = SettingsConfigDict(env_prefix="CORANTO_BROKER_", frozen=True)

    etcd: str = Field(default="127.0.0.1:2379", description="Endpoint of etcd: host:port, or https://host:port.")
    etcd_prefix: str = Field(default="/gazette/cluster", description="Where the cluster's keys live in etcd.")
    etcd_ca: Path | None = Field(default=None, description="PEM file: authorities that etcd's certificate is of.")
    etcd_cert: Path | None = Field(default=None, description="PEM file: certificate to show to etcd.")
    etcd_key: Path | None = Field(default=None, description="PEM file: key of etcd_cert.")
    host: str = Field(default="127.0.0.1", description="Address to listen on, and to tell others.")
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    advertise: str = Field(default="", description="Endpoint to tell others, when it differs: http://host:port.")
    http_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the HTTP gateway; 0 chooses a free one. Without, there is none.",
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of /metrics, /ready and /live; 0 chooses a free one."
    )
    zone: str = Field(default="local", description="Failure zone of this broker.")
    id: str = Field(default="broker-0", description="Name of this broker, unique within its zone.")
    data_dir: Path = Field(default=Path(".coranto/broker-0"), description="Folder for spools; of one broker only.")
    file_root: Path | None = Field(
        default=None, description="Folder that file:/// stores are rooted at; without, there are no such stores."
    )
    store_endpoints: str = Field(
        default="",
        description="Addresses that ?endpoint= of a store may name: http://host:port, with commas; * for any.",
    )
    lease_seconds: float = Field(default=20.0, gt=0, description="How long a dead broker goes unnoticed.")
    journal_limit: int = Field(default=1024, ge=0, le=131072, description="Most journals that this broker takes.")
    max_replication: int = Field(default=9, ge=1, description="Caps the replication of every journal.")
    fsync: Fsync = Field(
        default=Fsync.NEVER, description="When spools are forced to the disk: never, commit or interval."
    )
    fsync_interval: float = Field(default=1.0, gt=0, description="Seconds between the syncs of fsync=interval.")
    min_append_rate: int = Field(default=1 << 16, ge=0, description="Slower clients are cut off; 0 allows any rate.")
    max_append_rate: int = Field(default=0, ge=0, description="Caps every journal's append rate; 0 is unlimited.")
    max_appends: int = Field(
        default=1024, ge=0, description="Most appends under way at a time; others are refused. 0: any number."
    )
    group_append_bytes: int = Field(
        default=1 << 16,
        ge=0,
        le=1 << 20,
        description="Appends of at most this size that wait for each other are committed together; 0: none are.",
    )
    max_message_bytes: int = Field(default=4 << 20, ge=1 << 16, description="Largest message to accept.")
    chunk_bytes: int = Field(
        default=1 << 20, ge=1 << 10, le=3 << 20, description="Most content per message to readers."
    )
    cache_bytes: int = Field(
        default=2 << 30, ge=0, description="Disk space below data_dir for content read from fragment stores."
    )
    max_unpersisted_journal_bytes: int = Field(
        default=4 << 30,
        ge=0,
        description="Appends to a journal are refused while more of its completed fragments waits for its fragment "
        "store; 0: no bound.",
    )
    max_unpersisted_bytes: int = Field(
        default=16 << 30,
        ge=0,
        description="The same over all journals, for those of which something waits; 0: no bound.",
    )
    retention: bool = Field(
        default=True, description="Remove stored fragments that are older than their journal's retention."
    )
    retention_rate: float = Field(
        default=20.0, gt=0, description="Most fragments that retention removes per second, over all journals."
    )
    deleted_spool_seconds: float = Field(
        default=7 * 86400.0,
        ge=0,
        description="How long spools of deleted journals are kept in data_dir/deleted; 0 removes them at once.",
    )
    exit_seconds: float = Field(
        default=20.0, gt=0, description="Most time of a graceful exit, for each of draining, stopping and storing."
    )
    allow_nested_names: bool = Field(
        default=False,
        description="Let journals be created whose names nest with others', as in a/b and a/b/c.",
    )
    auth_keys: SecretStr = Field(
        default=SecretStr(""), description="Keys of tokens, base64 with commas; the first signs. Empty: no tokens."
    )
    tls_cert: Path | None = Field(default=None, description="PEM file: certificate chain to serve with TLS.")
    tls_key: Path | None = Field(default=None, description="PEM file: key of tls_cert.")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM file: clients and peers must show certificates of it."
    )
    peer_cert: Path | None = Field(default=None, description="PEM file: certificate to show to peers.")
    peer_key: Path | None = Field(default=None, description="PEM file: key of peer_cert.")
    peer_ca: Path | None = Field(default=None, description="PEM file: authorities that peers' certificates are of.")
    serve_anyone_without_keys: bool = Field(
        default=False,
        description="Listen beyond this machine although anyone there may then read and write everything.",
    )
    log_level: str = Field(default="info", description="debug, info, warning or error.")
    log_json: bool = Field(default=False, description="Log lines as JSON.")


SECRETS = frozenset(name for name, field in BrokerSettings.model_fields.items() if field.annotation is SecretStr)
"""Settings that are never printed and not allowed on the command line, which process lists show."""


def markdown_table() -> str:
    """Return the table of settings in docs/operations.md."""
    lines = ["| setting | default | |", "|---|---|---|"]
    for name, field in BrokerSettings.model_fields.items():
        default = field.get_default()
        shown = "" if default is None or name in SECRETS or default == "" else f"`{_plain(default)}`"
        lines.append(f"| `{name}` | {shown} | {field.description} |")
    return "\n".join(lines)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))
