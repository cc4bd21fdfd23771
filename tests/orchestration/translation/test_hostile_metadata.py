"""Texts from untrusted sources (names of objects, errors of stores) and secrets, in Dagster's pages."""

from __future__ import annotations

import base64
import re
import traceback

import dagster as dg
import pytest
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster._serdes import serialize_value
from markdown_it import MarkdownIt

from coranto.audit import Depth, Finding, Kind, Report, Severity, Subject
from coranto.errors import InvalidInput
from coranto.security.tokens import BearerToken
from dagster_coranto import JournalResource, SparkResource, SqlStoreResource
from dagster_coranto.resources import spark
from dagster_coranto.resources.hidden import hide, reveal
from dagster_coranto.translation.metadata import verbatim
from dagster_coranto.verification.checks import as_result

HOSTILE = (
    "![x](https://evil.example/pixel.png) [click](javascript:alert(1)) <img src=x onerror=alert(1)>"
    " https://evil.example \n\n# Title\n```\n````\n"
)
KEY = base64.b64encode(b"k" * 32).decode()


def test_findings_show_hostile_names_as_plain_text() -> None:
    """The check quotes names of objects and answers of stores. Any writer to a store controls both."""
    found_it = Finding(Kind.CONTENT_UNREADABLE, Severity.ERROR, Subject.journal("a/journal"), HOSTILE)
    report = Report("a/", Depth.DEEP, 0.0, 1.0, {"a/journal": {"head": 10}}, [found_it])
    result = as_result(report, dg.AssetCheckSeverity.ERROR)
    found = result.metadata["dagster-coranto/findings"]
    assert isinstance(found, dg.MarkdownMetadataValue)
    shown = MarkdownIt("commonmark", {"linkify": True}).parse(found.md_str or "")
    assert [token.type for token in shown] == ["fence"], "one block of plain text"
    assert "javascript:alert(1)" in shown[0].content


def test_lines_are_shown_unchanged() -> None:
    shown = MarkdownIt("commonmark").parse(verbatim(["- one", "- two `` three"]).md_str or "")
    assert [token.content for token in shown] == ["- one\n- two `` three\n"]


def test_the_representation_of_a_resource_contains_no_secrets() -> None:
    resource = JournalResource(endpoint="127.0.0.1:1", auth_token="header.secret-claims.signature", auth_keys=KEY)
    shown = f"{resource!r} {resource}"
    try:
        raise ValueError(f"cannot use {resource}")
    except ValueError:
        shown += traceback.format_exc()
    assert "secret-claims" not in shown
    assert KEY not in shown
    assert "127.0.0.1:1" in shown


def test_dagster_neither_stores_nor_sends_literal_secrets_of_a_resource() -> None:
    seen: list[str] = []

    @dg.asset
    def look(journals: JournalResource) -> None:
        seen.append(f"{journals!r} {journals.model_dump()} {dict(journals)}")
        dg.get_dagster_logger().info(f"reading with {journals!r}")
        auth = journals.client_config().auth
        assert auth == BearerToken.parse("header.secret-claims.signature"), "the asset itself has the token"

    resource = JournalResource(endpoint="127.0.0.1:1", auth_token="header.secret-claims.signature")
    others = {
        "store": SqlStoreResource(url="postgresql+psycopg://shop:secret-claims@db.example/shop"),
        "spark": SparkResource(settings={"spark.hadoop.fs.s3a.secret.key": "secret-claims", "spark.app.id": "shown"}),
    }
    seen.append(f"{others!r} {[each.model_dump() for each in others.values()]}")
    definitions = dg.Definitions(assets=[look], resources={"journals": resource, **others})
    repository = definitions.get_repository_def()
    job = definitions.resolve_implicit_global_asset_job_def()
    seen += [
        serialize_value(RepositorySnap.from_def(repository)),
        serialize_value(job.get_job_snapshot()),
    ]
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([look], resources={"journals": resource}, instance=instance)
        seen += [serialize_value(entry) for entry in instance.all_logs(result.run_id)]
        (run,) = instance.get_runs()
        seen.append(serialize_value(run))
    assert len(seen) > 5
    assert not [text for text in seen if "secret-claims" in text]
    assert re.search(r"\[hidden( \d+)?\]", seen[0]), "the placeholder shows that there is a secret"
    assert any("db.example" in text and "shown" in text for text in seen)


def test_spark_gets_its_secret_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    resource = SparkResource(settings={"spark.ssl.keyPassword": "secret-of-spark", "spark.ui.port": "4041"})
    assert resource.settings["spark.ssl.keyPassword"] != "secret-of-spark"
    monkeypatch.setattr(spark._SHARED, "acquire", lambda master, settings, short: given.update(settings))
    resource.session()
    assert given == {"spark.ssl.keyPassword": "secret-of-spark", "spark.ui.port": "4041"}


def test_each_secret_has_its_placeholder_and_variables_keep_their_names() -> None:
    one, two = hide("first-secret-of-test", "db.example"), hide("second-secret-of-test", "db.example")
    assert one == "[hidden] db.example"
    assert two == "[hidden 2] db.example"
    assert (reveal(one), reveal(two)) == ("first-secret-of-test", "second-secret-of-test")
    assert hide(one) == one
    variable = dg.EnvVar("TEAM_TOKEN")
    assert hide(variable) is variable
    with pytest.raises(InvalidInput, match="does not know"):
        reveal("[hidden 99] elsewhere")
