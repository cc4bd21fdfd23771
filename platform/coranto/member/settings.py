"""The settings that all members share: their names, limits and descriptions.

The command line options, the environment variables, the keys of a configuration file and the tables in the docs all
come from `MemberSettings` and its two subclasses. `coranto.member.configuration` defines the precedence of sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class MemberSettings(BaseSettings):
    """The settings of one member. Sizes are in bytes, times in seconds, rates in bytes per second."""

    model_config = SettingsConfigDict(frozen=True)
    command: ClassVar[str]
    """The group of commands that take these settings, such as `coranto broker`."""
    harm: ClassVar[str]
    """The actions that any caller may take if a member has no keys, such as "change shards"."""

    etcd: str = Field(default="127.0.0.1:2379", description="Endpoint of etcd: host:port, or https://host:port.")
    etcd_prefix: str = Field(default="/gazette/cluster", description="Where the cluster's keys live in etcd.")
    etcd_ca: Path | None = Field(
        default=None, description="PEM file: authorities that may have signed etcd's certificate."
    )
    etcd_cert: Path | None = Field(default=None, description="PEM file: certificate to show to etcd.")
    etcd_key: Path | None = Field(default=None, description="PEM file: key of etcd_cert.")
    host: str = Field(default="127.0.0.1", description="Address to listen on, and to advertise.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    advertise: str = Field(default="", description="Endpoint to advertise, if it differs: http://host:port.")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of /metrics, /ready and /live; 0 chooses a free one."
    )
    zone: str = Field(default="local", description="Failure zone of this process.")
    id: str = Field(default="", description="Name of this process, unique within its zone. Default: host and pid.")
    lease_seconds: float = Field(default=20.0, gt=0, description="Time until others notice that this process has died.")
    exit_seconds: float = Field(
        default=20.0,
        gt=0,
        description="Maximum time of each phase of a graceful exit: draining, stopping, storing and leaving.",
    )
    etcd_caller_bytes: int = Field(
        default=32 << 20,
        ge=0,
        description="Maximum bytes that one caller may write to etcd through this process in 20 minutes; 0: no limit.",
    )
    max_etcd_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="Callers may not write to etcd while its database uses more; less than etcd's quota; 0: no limit.",
    )
    auth_keys: SecretStr = Field(
        default=SecretStr(""), description="Keys of tokens, base64 with commas; the first signs. Empty: no tokens."
    )
    oidc: Path | None = Field(
        default=None, description="TOML file: OpenID Connect provider whose tokens are accepted besides tokens by keys."
    )
    tls_cert: Path | None = Field(default=None, description="PEM file: certificate chain to serve with TLS.")
    tls_key: Path | None = Field(default=None, description="PEM file: key of tls_cert.")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM file: authority whose certificates clients and peers must show."
    )
    peer_cert: Path | None = Field(default=None, description="PEM file: certificate to show to peers.")
    peer_key: Path | None = Field(default=None, description="PEM file: key of peer_cert.")
    peer_ca: Path | None = Field(
        default=None, description="PEM file: authorities that may have signed peers' certificates."
    )
    serve_anyone_without_keys: bool = Field(
        default=False,
        description="Listen beyond this machine although anyone there may then read and change everything.",
    )
    log_level: str = Field(default="info", description="debug, info, warning or error.")
    log_json: bool = Field(default=False, description="Log lines as JSON.")
    traces: bool = Field(
        default=False, description="Export traces as the OTEL_* variables say; needs the extra `traces`."
    )

    @classmethod
    def secrets(cls) -> frozenset[str]:
        """Return the settings that are never printed, and not allowed on the command line, which process lists show."""
        return frozenset(name for name, field in cls.model_fields.items() if field.annotation is SecretStr)

    @classmethod
    def variable(cls, name: str) -> str:
        """Return the environment variable of a setting."""
        return f"{cls.model_config['env_prefix']}{name.upper()}"
