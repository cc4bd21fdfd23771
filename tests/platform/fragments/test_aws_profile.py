"""AWS's shared configuration files."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto.errors import InvalidInput
from coranto.fragments.aws_profile import AwsProfile, load

CREDENTIALS = """
[default]
aws_access_key_id = DEFAULT
aws_secret_access_key = a%b
[team]
aws_access_key_id = TEAM
aws_secret_access_key = t
aws_session_token = token
[elsewhere]
aws_access_key_id = ELSE
aws_secret_access_key = e
region = sa-east-1
"""
CONFIG = """
[default]
region = eu-west-1
[profile team]
region = eu-north-1
[profile elsewhere]
region = us-west-2
[profile sso]
sso_session = x
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "credentials").write_text(CREDENTIALS)
    (tmp_path / "config").write_text(CONFIG)
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }


def test_the_default_profile_is_read(environ: dict[str, str]) -> None:
    assert load("", environ) == AwsProfile("DEFAULT", "a%b", "", "eu-west-1")


def test_a_named_profile_is_read(environ: dict[str, str]) -> None:
    assert load("team", environ) == AwsProfile("TEAM", "t", "token", "eu-north-1")
    assert load("elsewhere", environ).region == "sa-east-1"
    assert load("", environ | {"AWS_PROFILE": "team"}).access_key_id == "TEAM"


def test_variables_precede_the_default_profile_but_not_a_named_one(environ: dict[str, str]) -> None:
    environ |= {"AWS_ACCESS_KEY_ID": "ENV", "AWS_SECRET_ACCESS_KEY": "e", "AWS_REGION": "us-east-2"}
    assert load("", environ) == AwsProfile(region="us-east-2")
    assert load("team", environ) == AwsProfile("TEAM", "t", "token", "eu-north-1")
    environ["AWS_REGION"] = ""
    assert load("", environ) == AwsProfile(region="eu-west-1")


@pytest.mark.parametrize("name", ["absent", "sso"])
def test_profiles_without_static_keys_are_refused(environ: dict[str, str], name: str) -> None:
    with pytest.raises(InvalidInput, match="only static keys are read"):
        load(name, environ)


def test_without_files_the_profile_is_empty(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert load("", {"AWS_SHARED_CREDENTIALS_FILE": nowhere, "AWS_CONFIG_FILE": nowhere}) == AwsProfile()


def test_unreadable_files_are_reported(environ: dict[str, str]) -> None:
    Path(environ["AWS_SHARED_CREDENTIALS_FILE"]).write_text("no section\n")
    with pytest.raises(InvalidInput, match="cannot be read as AWS configuration"):
        load("team", environ)


def test_secrets_are_not_in_the_text(environ: dict[str, str]) -> None:
    text = repr(load("", environ))
    assert "DEFAULT" in text
    assert "a%b" not in text
