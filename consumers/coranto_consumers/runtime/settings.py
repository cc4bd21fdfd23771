"""Settings of a consumer process. They define the options of the command line and the environment variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from coranto.member.settings import MemberSettings
from coranto_consumers.outputs.identity import checked_codes


class ConsumerProcessSettings(MemberSettings):
    """Settings of one consumer process, in addition to all members'. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix="CORANTO_CONSUMER_", frozen=True)
    command: ClassVar[str] = "coranto consumer"
    harm: ClassVar[str] = "change shards"

    etcd: str = Field(default="", description="Endpoint of etcd. Default: the cluster of `coranto up`.")
    etcd_prefix: str = Field(default="", description="Prefix of the shards' keys in etcd. Default: by application.")
    exit_seconds: float = Field(default=20.0, gt=0, description="Maximum time to hand over shards on exit.")
    shard_limit: int = Field(default=32, ge=0, le=131072, description="Maximum number of shards in this process.")
    max_hot_standbys: int = Field(default=3, ge=0, description="Caps the hot standbys of every shard.")
    accept_changes: Annotated[str, AfterValidator(checked_codes)] = Field(
        default="", description="Codes of intended changes of shards, separated by commas. The error has the code."
    )
    data_dir: Path | None = Field(
        default=None, description="Folder for the files of recovery logs. Default: the folder for temporary files."
    )
