"""AWS credentials and region from the shared configuration files.

The object store library reads environment variables and instance roles, but not `~/.aws/credentials` and
`~/.aws/config`. This module reads only static keys. A profile that gets its keys in another way is refused with advice.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coranto.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class AwsProfile:
    """Static credentials (empty: the library finds its own) and the region (empty: unknown)."""

    access_key_id: str = ""
    secret_access_key: str = ""
    session_token: str = ""
    region: str = ""

    def __repr__(self) -> str:
        return f"AwsProfile(access_key_id={self.access_key_id!r}, region={self.region!r})"


def load(name: str, environ: Mapping[str, str]) -> AwsProfile:
    """Load the profile `name`; if `name` is empty, the environment and the default profile.

    Environment variables override the default profile, as in AWS's own tools, but not a named profile. Raises
    InvalidInput when a named profile doesn't exist or has no static keys.
    """
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or ""
    if not name and environ.get("AWS_ACCESS_KEY_ID"):
        # The library takes the keys from the same variables.
        return AwsProfile(region=region or _section("default", environ).get("region", ""))
    wanted = name or environ.get("AWS_PROFILE") or "default"
    section = _section(wanted, environ)
    if name and "aws_access_key_id" not in section:
        raise InvalidInput(
            f"the AWS profile {name!r} has no aws_access_key_id in {_credentials_path(environ)}; only static keys are "
            "read from profiles, so leave ?profile= out to use environment variables or the instance's role",
            field="store",
        )
    return AwsProfile(
        access_key_id=section.get("aws_access_key_id", ""),
        secret_access_key=section.get("aws_secret_access_key", ""),
        session_token=section.get("aws_session_token", ""),
        region=(section.get("region") or region) if name else (region or section.get("region", "")),
    )


def _credentials_path(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")


def _section(name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the profile's settings. The credentials file overrides the configuration file."""
    config_path = Path(environ.get("AWS_CONFIG_FILE") or Path.home() / ".aws" / "config")
    in_config = name if name == "default" else f"profile {name}"
    return _read(config_path, in_config) | _read(_credentials_path(environ), name)


def _read(path: Path, section: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as err:
        raise InvalidInput(f"{path} cannot be read as AWS configuration: {err}", field="store") from err
    return dict(parser.items(section)) if parser.has_section(section) else {}
