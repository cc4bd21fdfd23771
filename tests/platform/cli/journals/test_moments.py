"""`--as-of`: commands, scans and clients read the same bytes as of a time, or report missing content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coranto.client import Moment, SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.errors import ContentGone, JournalRecreated
from coranto.fragments.fragment import Codec
from coranto.lake import Manifest
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import Flags
from coranto.testing.command_line import CommandLine, RemoteBroker
from tests.platform.client.test_moments import SIZE, T, line

JOURNALS = ("shop/a", "shop/b")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: RemoteBroker) -> Path:
    """The root of file stores, with two journals of three stored messages and one that is not stored."""
    monkeypatch.setenv("CORANTO_FILE_ROOT", str(tmp_path))
    for number, name in enumerate(JOURNALS):
        journal = remote.fake.create(name)
        for second in range(4):
            last = Flags.CONTINUE_TXN if second == 2 else Flags.OUTSIDE_TXN  # Not committed at that time.
            remote.write(name, line(10 * second + number, second, last))
            if second < 3:
                journal.roll(tmp_path, Codec.GZIP)
    return tmp_path


def test_commands_and_clients_read_the_same_as_of_a_time(run: CommandLine, remote: RemoteBroker, root: Path) -> None:
    then = str(T + 20)  # The third message of shop/b is later.
    contents = remote.contents()
    expected = contents["shop/a"][: 3 * SIZE], contents["shop/b"][: 2 * SIZE]
    read = run("read", "-l", "name:prefix=shop/", "--as-of", then)
    assert (read.code, sorted(read.output.splitlines())) == (0, sorted(b"".join(expected).decode().splitlines()))
    manifest = Manifest.from_json(run("manifest", "shop/", "--as-of", then).output)
    assert [(each.journal, each.begin, each.end) for each in manifest.journals] == [
        ("shop/a", 0, 3 * SIZE),
        ("shop/b", 0, 2 * SIZE),
    ]
    offsets = root / "then.json"
    offsets.write_text(json.dumps({each.journal: each.end for each in manifest.journals}))
    again = run("read", "-l", "name:prefix=shop/", "--as-of", str(offsets))
    assert sorted(again.output.splitlines()) == sorted(read.output.splitlines())
    listed = Manifest.from_json(run("manifest", "shop/", "--as-of", str(offsets)).output)
    assert listed.journals == manifest.journals
    committed = run("read", "shop/a", "--committed", "--as-of", then).output
    assert committed.encode() == expected[0][: 2 * SIZE]
    with SyncJournalClient(remote.fake.endpoint) as client:
        moment = client.moment("name:prefix=shop/", T + 20)
        assert moment == Moment.offsets({"shop/a": 3 * SIZE, "shop/b": 2 * SIZE})
        found = [each.end for each in committed_messages(client, "shop/a", JsonLines(), as_of=moment)]
        assert found == [SIZE, 2 * SIZE]
        assert list(committed_messages(client, "shop/none", JsonLines(), as_of=moment)) == []


def test_commands_and_clients_report_content_that_is_gone(run: CommandLine, remote: RemoteBroker, root: Path) -> None:
    for name in JOURNALS:
        remote.fake.journals[name].drop_before(SIZE)
    offsets = root / "then.json"
    offsets.write_text(json.dumps(dict.fromkeys(JOURNALS, 2 * SIZE)))
    missing = f"shop/a [0, {SIZE}), shop/b [0, {SIZE})"
    for words in (["read", "-l", "name:prefix=shop/"], ["manifest", "shop/"]):
        result = run(*words, "--as-of", str(offsets))
        assert (result.code, result.output) == (1, "")
        assert missing in result.errors
    begins = root / "begins.json"
    begins.write_text(json.dumps(dict.fromkeys(JOURNALS, SIZE)))
    left = run("read", "-l", "name:prefix=shop/", "--as-of", str(offsets), "--offsets", str(begins))
    assert left.output.encode() in [
        b"".join(remote.contents()[name][:SIZE] for name in order) for order in (JOURNALS, JOURNALS[::-1])
    ]
    manifest = Manifest.from_json(run("manifest", "shop/", "--as-of", str(offsets), "--begin", str(SIZE)).output)
    assert {(each.begin, each.end) for each in manifest.journals} == {(SIZE, 2 * SIZE)}
    with SyncJournalClient(remote.fake.endpoint) as client, pytest.raises(ContentGone):
        list(committed_messages(client, "shop/a", JsonLines(), as_of=Moment({"shop/a": SIZE})))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["read", "shop/a", "--as-of", "2100-01-01"], "is in the future"),
        (["read", "shop/a", "--as-of", "yesterday"], "is not a time"),
        (["read", "shop/a", "--as-of", "1h", "--block"], "has an end; leave --end, --block"),
        (["read", "shop/a", "--as-of", "none.json"], "there is no file none.json"),
        (["manifest", "shop/", "--as-of", "1h", "--end", "5"], "has an end itself; leave the end out"),
    ],
    ids=str,
)
def test_invalid_moments_are_refused(
    words: list[str], problem: str, run: CommandLine, remote: RemoteBroker, root: Path
) -> None:
    result = run(*words)
    assert result.code != 0
    assert problem in result.errors


def test_offsets_of_an_earlier_journal_are_refused_by_every_command(
    run: CommandLine, remote: RemoteBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORANTO_FILE_ROOT", str(tmp_path))
    remote.fake.has_ids = True
    names = sorted(JOURNALS)

    def create(lines: int) -> None:
        for name in names:
            remote.fake.create(name)
            for second in range(lines):
                remote.write(name, line(second, lines))

    create(2)
    offsets = tmp_path / "then.json"
    assert run("read", "-l", "name:prefix=shop/", "--offsets-out", str(offsets)).code == 0
    offsets_out = json.loads(offsets.read_text())
    first = {name: remote.fake.journals[name].journal_id for name in names}
    assert offsets_out == {name: {"offset": 2 * SIZE, "journal_id": first[name]} for name in names}
    selected = ["read", "-l", "name:prefix=shop/"]
    assert run(*selected, "--offsets", str(offsets)).output == "", "all of it is read"

    create(5)  # They grow beyond the offsets.
    assert [remote.fake.journals[name].journal_id for name in names] != list(first.values())
    for words in (
        [*selected, "--offsets", str(offsets)],
        [*selected, "--as-of", str(offsets)],
        ["read", "shop/a", "--offsets", str(offsets)],
        ["read", "shop/a", "--committed", "--as-of", str(offsets)],
        ["manifest", "shop/", "--as-of", str(offsets)],
        ["manifest", "shop/", "--end", str(offsets)],
        ["manifest", "shop/", "--begin", str(offsets)],
        ["fork", "shop/a", "what-if/a", "--as-of", str(offsets)],
    ):
        result = run(*words)
        assert (result.code, result.output) == (1, ""), words
        assert "was deleted and created again: offset" in result.errors, words
    assert json.loads(offsets.read_text()) == offsets_out

    with SyncJournalClient(remote.fake.endpoint) as client:
        moment = client.moment("name:prefix=shop/", T + 1)
        assert moment.ends == dict.fromkeys(names, 2 * SIZE)
        create(6)
        with pytest.raises(JournalRecreated):
            client.require_content(moment)
        with pytest.raises(JournalRecreated):
            list(committed_messages(client, "shop/a", JsonLines(), as_of=moment))
        with pytest.raises(JournalRecreated):
            list(committed_messages(client, "shop/a", JsonLines(), begin=moment.ends["shop/a"]))

    # Follow the errors' advice: plain numbers apply to any journal, and an omitted journal is read completely.
    offsets.write_text(json.dumps({name: each["offset"] for name, each in offsets_out.items()}))
    for option in ("--offsets", "--as-of"):
        assert len(run(*selected, option, str(offsets)).output.splitlines()) == {"--offsets": 8, "--as-of": 4}[option]
    offsets.write_text(json.dumps({"shop/b": offsets_out["shop/b"]["offset"]}))
    assert len(run(*selected, "--offsets", str(offsets)).output.splitlines()) == 6 + 4
