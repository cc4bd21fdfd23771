"""The settings of a broker process. The environment variables are CORANTO_BROKER_<NAME>; see `MemberSettings`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from coranto.member.settings import MemberSettings
from coranto_broker.spool.durable_spool import Fsync


class BrokerSettings(MemberSettings):
    """The settings of one broker, in addition to all members' settings."""

    model_config = SettingsConfigDict(env_prefix="CORANTO_BROKER_", frozen=True)
    command: ClassVar[str] = "coranto broker"
    harm: ClassVar[str] = "read and write everything"

    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    http_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the HTTP gateway; 0 chooses a free one. Unset: no gateway.",
    )
    frame_port: int = Field(
        default=0,
        ge=-1,
        le=65535,
        description="Port of the frame transport for small appends and replication; 0: any, -1: none.",
    )
    id: str = Field(default="broker-0", description="Name of this broker, unique within its zone.")
    data_dir: Path = Field(default=Path(".coranto/broker-0"), description="Folder for spools; for one broker only.")
    file_root: Path | None = Field(
        default=None, description="Folder that file:/// stores are rooted at. Unset: no such stores."
    )
    store_endpoints: str = Field(
        default="",
        description="Addresses that ?endpoint= of a store may name: http://host:port, with commas; * for any.",
    )
    journal_limit: int = Field(default=1024, ge=0, le=131072, description="Maximum number of journals on this broker.")
    max_replication: int = Field(default=9, ge=1, description="Caps the replication of every journal.")
    fsync: Fsync = Field(
        default=Fsync.NEVER, description="When spools are forced to the disk: never, commit or interval."
    )
    fsync_interval: float = Field(default=1.0, gt=0, description="Seconds between the syncs of fsync=interval.")
    min_append_rate: int = Field(default=1 << 16, ge=0, description="Slower clients are cut off; 0 allows any rate.")
    max_append_rate: int = Field(default=0, ge=0, description="Caps every journal's append rate; 0 is unlimited.")
    max_appends: int = Field(
        default=1024,
        ge=0,
        description="Maximum appends in flight; others are refused, and appends of streams wait. 0: any number.",
    )
    max_blocking_reads: int = Field(
        default=2048,
        ge=0,
        description="Maximum blocking reads of one caller at a time; others are refused. 0: any number.",
    )
    quotas: Path | None = Field(
        default=None, description="YAML file of quotas: the rates and open streams of each caller at this broker."
    )
    group_append_bytes: int = Field(
        default=1 << 16,
        ge=0,
        le=1 << 20,
        description="Appends up to this size are committed together while they wait; 0: never.",
    )
    max_message_bytes: int = Field(  # Clients and primaries send up to 1 MiB of content with its metadata.
        default=4 << 20, ge=2 << 20, description="Largest message to accept, at least 2 MiB."
    )
    chunk_bytes: int = Field(
        default=1 << 20, ge=1 << 10, le=3 << 20, description="Maximum content per message to readers."
    )
    disk_reserve_bytes: int = Field(
        default=64 << 20,
        ge=0,
        description="Replicated appends are refused while less than this is free on the disk of a replica; 0: never.",
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
        description="The same over all journals, for journals with waiting fragments; 0: no bound.",
    )
    retention: bool = Field(
        default=True, description="Remove stored fragments that are older than their journal's retention."
    )
    retention_rate: float = Field(
        default=20.0,
        gt=0,
        description="Maximum number of fragments that retention removes per second, over all journals.",
    )
    deleted_spool_seconds: float = Field(
        default=7 * 86400.0,
        ge=0,
        description="How long spools of deleted journals are kept in data_dir/deleted; 0 removes them immediately.",
    )
    allow_nested_names: bool = Field(
        default=False,
        description="Let journals be created whose names nest with others', as in a/b and a/b/c.",
    )
