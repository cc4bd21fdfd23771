"""`coranto journals manifest`: it is complete for its offsets, and changes to it are detected."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from coranto.errors import InvalidInput, Unauthenticated
from coranto.fragments.fragment import Codec
from coranto.labels import CONTENT_TYPE, label_set
from coranto.lake import Manifest, load_manifest, sign_manifest, verify_manifest
from coranto.security.tokens import Keys
from coranto.testing.command_line import CommandLine, CommandResult, RemoteBroker

J = "shop/orders"
KEY, OTHER = (base64.b64encode(letter * 32).decode() for letter in (b"k", b"o"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: RemoteBroker) -> Path:
    """The root of file stores, with a journal of three stored fragments [0, 40) and 4 bytes that are not stored."""
    monkeypatch.setenv("CORANTO_FILE_ROOT", str(tmp_path))
    journal = remote.fake.create(J)
    journal.spec.labels.CopyFrom(label_set([(CONTENT_TYPE, "application/x-ndjson")]))
    for size in (10, 20, 10):
        remote.write(J, b"x" * (size - 1) + b"\n")
        journal.roll(tmp_path, Codec.GZIP)
    remote.write(J, b"new\n")
    return tmp_path


def written(result: CommandResult) -> Manifest:
    assert result.code == 0, result.errors
    return Manifest.from_json(result.output)


def test_a_manifest_lists_stored_and_counts_unstored_content(
    run: CommandLine, remote: RemoteBroker, root: Path
) -> None:
    before = time.time()
    result = run("journals", "manifest", J)
    found = written(result)
    (part,) = found.journals
    assert (part.begin, part.end, part.unstored_end, part.unstored) == (0, 40, 44, 4)
    assert "4 B are not stored yet" in result.errors
    assert part.content_type == "application/x-ndjson"
    assert found.selector == f"name={J}"
    assert before <= found.made_at <= time.time()
    assert [(each.begin, each.end, each.length, each.codec) for each in part.fragments] == [
        (0, 10, 10, "gzip"),
        (10, 30, 20, "gzip"),
        (30, 40, 10, "gzip"),
    ]
    for each in part.fragments:
        assert each.sha1 in each.url
        assert Path(each.url).is_file(), "a path that this machine can read"
        assert before - 1 <= each.stored_at <= time.time()
    table = run("journals", "manifest", "shop/", "-o", "table").output.splitlines()
    assert table[1].split() == [J, "0", "40", "40", "B", "3", "4", "B"]


def test_bounds_select_fragments(run: CommandLine, remote: RemoteBroker, root: Path) -> None:
    (part,) = written(run("journals", "manifest", J, "--begin", "12", "--end", "30")).journals
    assert (part.begin, part.end, part.unstored_end, len(part.fragments)) == (12, 30, 30, 1)
    (part,) = written(run("journals", "manifest", J, "--begin", "42")).journals
    assert (part.begin, part.end, part.unstored_end, len(part.fragments)) == (42, 42, 44, 0)
    offsets = root / "offsets.json"
    offsets.write_text(json.dumps({J: 30, "another/journal": 1}))
    (part,) = written(run("journals", "manifest", J, "--begin", str(offsets))).journals
    assert (part.begin, [each.begin for each in part.fragments]) == (30, [30])
    offsets.write_text(json.dumps({"another/journal": 1}))
    assert f"has no offset of {J}" in run("journals", "manifest", J, "--begin", str(offsets)).errors


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--begin", "45"], "45 is beyond the end 44"),
        (["--end", "45"], "its head is 44, and 45 is beyond it"),
        (["--begin", "/no/such/file"], "--begin: there is no file /no/such/file"),
        (["--as-of", "2100-01-01"], "--as-of: is in the future"),
        (["-o", "yaml"], "give -o table or -o json"),
        (["--sign", "-o", "table"], "leave -o out"),
        (["--sign"], "$CORANTO_AUTH_KEYS: is not set"),
    ],
    ids=str,
)
def test_invalid_options_are_errors(
    words: list[str],
    problem: str,
    run: CommandLine,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CORANTO_AUTH_KEYS", raising=False)
    result = run("journals", "manifest", J, *words)
    assert (result.code, result.output) == (1, "")
    assert problem in result.errors


def test_a_selector_that_matches_nothing_is_an_error(run: CommandLine, root: Path) -> None:
    assert "no journal matches 'name:prefix=none/'" in run("journals", "manifest", "none/").errors


def test_gaps_are_errors(run: CommandLine, remote: RemoteBroker, root: Path) -> None:
    journal = remote.fake.journals[J]
    kept = list(journal.stored)
    journal.stored = [kept[0], kept[2]]
    result = run("journals", "manifest", J)
    assert "the content from 10 to 30 is gone; make one manifest up to 10 (--end), and one from 30" in result.errors
    assert written(run("journals", "manifest", J, "--end", "10")).journals[0].end == 10
    assert written(run("journals", "manifest", J, "--begin", "30")).journals[0].begin == 30
    journal.drop_before(10)
    assert written(run("journals", "manifest", J)).journals[0].begin == 30
    assert "the content from 5 to 30 is gone; give 30 or more" in run("journals", "manifest", J, "--begin", "5").errors


def test_content_after_an_unstored_fragment_is_not_listed(run: CommandLine, remote: RemoteBroker, root: Path) -> None:
    """Brokers may store a fragment before an earlier one."""
    stored = remote.fake.journals[J].stored
    stored[1] = replace(stored[1], fragment=replace(stored[1].fragment, backing_store="", mod_time=0), url="")
    (part,) = written(run("journals", "manifest", J)).journals
    assert (part.begin, part.end, part.unstored, len(part.fragments)) == (0, 10, 34, 1)


def test_the_root_of_file_stores_must_be_known(run: CommandLine, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORANTO_FILE_ROOT")
    assert "set $CORANTO_FILE_ROOT" in run("journals", "manifest", J).errors
    (part,) = written(run("journals", "manifest", J, "--url-ttl", "15m")).journals
    assert part.fragments[0].url.startswith(f"file:///fragments/{J}/")


def test_a_signed_manifest_is_verified(run: CommandLine, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("journals", "manifest", J).output
    monkeypatch.setenv("CORANTO_AUTH_KEYS", KEY)
    monkeypatch.setattr("coranto.cli.connect.ClientConfig.from_environment", _without_tokens)
    signed = run("journals", "manifest", J, "--sign").output
    path, unsigned = root / "orders.manifest", root / "orders.json"
    path.write_text(signed)
    unsigned.write_text(plain)
    found = load_manifest(path)
    assert found.journals == Manifest.from_json(plain).journals
    assert load_manifest(path, Keys.parse(f"{OTHER},{KEY}")) == found
    head, body, signature = signed.strip().split(".")
    forged = found.to_json().replace(found.fragments[0].sha1, "0" * 40)
    body = base64.urlsafe_b64encode(forged.encode()).decode().rstrip("=")
    path.write_text(f"{head}.{body}.{signature}")
    with pytest.raises(Unauthenticated, match="the manifest was changed after it was signed"):
        load_manifest(path)
    with pytest.raises(Unauthenticated, match="with a key that is not among"):
        verify_manifest(sign_manifest(found, Keys.parse(OTHER)), Keys.parse(KEY))
    with pytest.raises(Unauthenticated, match="is not signed, and keys are given"):
        load_manifest(unsigned, Keys.parse(KEY))
    with pytest.raises(InvalidInput, match="coranto journals manifest --sign"):
        verify_manifest("no manifest", Keys.parse(KEY))
    with pytest.raises(InvalidInput, match="there is no file"):
        load_manifest(root / "gone")


def _without_tokens(endpoint: str, file_root: Path | None, retry_timeout: float) -> object:
    """The fake broker does not accept tokens."""
    from coranto.client import ClientConfig

    return ClientConfig(endpoint, file_root, retry_timeout)


def test_an_inconsistent_manifest_is_refused(run: CommandLine, root: Path) -> None:
    found = written(run("journals", "manifest", J))
    (part,) = found.journals

    def reason(changed: Manifest) -> str:
        with pytest.raises(InvalidInput) as error:
            Manifest.from_json(changed.to_json())
        return str(error.value)

    def having(**fields: object) -> Manifest:
        return replace(found, journals=[replace(part, **fields)])  # type: ignore[arg-type]

    first, *others = part.fragments
    assert "no fragment of the manifest has the content at 0" in reason(having(fragments=others))
    assert "has the content at 30" in reason(having(fragments=part.fragments[:2]))
    assert "are not ascending offsets" in reason(having(unstored_end=39))
    assert "has not the length 11" in reason(having(fragments=[replace(first, length=11), *others]))
    assert "not a codec and a SHA-1" in reason(having(fragments=[replace(first, sha1="xyz"), *others]))
    assert "lists a fragment of other/journal" in reason(
        having(fragments=[replace(first, journal="other/journal"), *others])
    )
    assert "names a journal twice" in reason(replace(found, journals=[part, part]))
    assert "has format 2" in reason(replace(found, format=2))
    with pytest.raises(InvalidInput, match="is not a manifest"):
        Manifest.from_json("{}")
