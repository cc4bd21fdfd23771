"""Settings of a consumer process. They define the options of the command line and the environment variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class ConsumerProcessSettings(BaseSettings):
    """Settings of one consumer process. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix="CORANTO_CONSUMER_", frozen=True)

    etcd: str = Field(default="", description="Endpoint of etcd. Default: that of the cluster of `coranto up`.")
    etcd_prefix: str = Field(default="", description="Where the shards' keys live in etcd. Default: by application.")
    etcd_ca: Path | None = Field(default=None, description="PEM file: authorities that etcd's certificate is of.")
    etcd_cert: Path | None = Field(default=None, description="PEM file: certificate to show to etcd.")
    etcd_key: Path | None = Field(default=None, description="PEM file: key of etcd_cert.")
    host: str = Field(default="127.0.0.1", description="Address to listen on, and to tell others.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    advertise: str = Field(default="", description="Endpoint to tell others, when it differs: http://host:port.")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of the metrics; 0 chooses a free one. Without, there are none."
    )
    zone: str = Field(default="local", description="Failure zone of this process.")
    id: str = Field(default="", description="Name of this process, unique within its zone. Default: host and pid.")
    lease_seconds: float = Field(default=20.0, gt=0, description="How long a dead process goes unnoticed.")
    shard_limit: int = Field(default=32, ge=0, le=131072, description="Most shards that this process takes.")
    max_hot_standbys: int = Field(default=3, ge=0, description="Caps the hot standbys of every shard.")
    data_dir: Path | None = Field(
        default=None, description="Folder for what recovery logs are played into. Default: that of temporary files."
    )
    exit_seconds: float = Field(default=20.0, gt=0, description="Most time to hand shards over on exit.")
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
        default=False, description="Listen beyond this machine although anyone there may then change the shards."
    )
    log_level: str = Field(default="info", description="debug, info, warning or error.")
    log_json: bool = Field(default=False, description="Log lines as JSON.")


SECRETS = frozenset(
    name for name, field in ConsumerProcessSettings.model_fields.items() if field.annotation is SecretStr
)
"""Settings that are not options of the command line, because lists of processes show it."""
