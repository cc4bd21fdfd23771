"""Store URLs."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.fragments.store_urls import StoreUrl, parse_store_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:///", StoreUrl("file:///", "file", "", "")),
        ("file:///a/b/", StoreUrl("file:///a/b/", "file", "", "a/b/")),
        ("s3://bucket/", StoreUrl("s3://bucket/", "s3", "bucket", "")),
        (
            "s3://bucket/a%20b/?Region=eu-west-1&storageClass=STANDARD_IA&find=x&replace=y",
            StoreUrl(
                "s3://bucket/a%20b/?Region=eu-west-1&storageClass=STANDARD_IA&find=x&replace=y",
                "s3",
                "bucket",
                "a b/",
                find="x",
                replace="y",
                options={"region": "eu-west-1", "storageClass": "STANDARD_IA"},
            ),
        ),
        ("gs://bucket/p/", StoreUrl("gs://bucket/p/", "gs", "bucket", "p/")),
        ("azure://container/p/", StoreUrl("azure://container/p/", "azure", "container", "p/")),
        (
            "azure-ad://tenant/account/container/p/q/",
            StoreUrl(
                "azure-ad://tenant/account/container/p/q/",
                "azure-ad",
                "container",
                "p/q/",
                tenant="tenant",
                account="account",
            ),
        ),
        (
            "azure-ad://tenant/account/container/",
            StoreUrl(
                "azure-ad://tenant/account/container/", "azure-ad", "container", "", tenant="tenant", account="account"
            ),
        ),
    ],
)
def test_urls_are_parsed(text: str, expected: StoreUrl) -> None:
    assert parse_store_url(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must begin with one of file://, s3://"),
        ("/a/path/", "must begin with one of"),
        ("ftp://host/", "must begin with one of"),
        ("http://[::1/", "not a URL"),
        ("file:///a/b", "must begin and end with '/'"),
        ("file://host/a/", "has the host 'host'"),
        ("file:a/", "must begin and end with '/'"),
        ("s3:///a/", "has no bucket"),
        ("gs://bucket", "must begin and end with '/'"),
        ("azure:///x/", "has no container"),
        ("azure-ad:///a/c/", "has no tenant"),
        ("azure-ad://tenant/account/", "must be azure-ad://tenant/account/container/prefix/"),
        ("azure-ad://tenant/", "must be azure-ad://tenant/account/container/prefix/"),
        ("file:///a/../b/", "empty, '.' or '..' part"),
        ("file:///a/%2e%2e/b/", "empty, '.' or '..' part"),
        ("s3://bucket//a/", "empty, '.' or '..' part"),
        ("file:///a/#x/", "has a '#' part"),
        ("file:///a/?region=x", "has the argument 'region', which file:// doesn't know"),
        ("s3://bucket/?regoin=x", "known are profile, endpoint, region"),
        ("s3://bucket/?region=x&REGION=y", "more than once"),
        ("s3://bucket/?region", "not a URL"),
    ],
)
def test_invalid_store_urls_are_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem.replace("?", r"\?")) as caught:
        parse_store_url(text)
    assert caught.value.field == "store"


def test_arguments_of_newer_versions_can_be_allowed() -> None:
    url = parse_store_url("s3://bucket/?region=x&turbo=yes", check_options=False)
    assert url.options == {"region": "x"}


def test_keys_are_rewritten_once_and_only_behind_the_prefix() -> None:
    url = parse_store_url("file:///old/?find=old/&replace=new/")
    assert url.key("a/old/b/old/c") == "old/a/new/b/old/c"
    assert url.key("other/journal") == "old/other/journal"
    assert parse_store_url("file:///p/").key("a/b") == "p/a/b"
