"""The YAML model of a component's cluster, and the resources of components."""

import hashlib
from typing import Any, Final

import dagster as dg
from dagster.components.resolved.base import resolve_fields
from pydantic import Field

from dagster_coranto.resources.journals import JournalResource


class ClusterModel(dg.Model, dg.Resolvable):
    """A cluster of brokers. Empty fields, and tokens and certificates, come from the environment (JournalResource).

    There are no fields for secrets, so that no file contains them.
    """

    endpoint: str = Field(
        default="",
        description="Brokers, as host:port or a URL; several are separated by commas. Empty: $CORANTO_ENDPOINT when "
        "assets run, otherwise the cluster below data_dir.",
        examples=["{{ env.CORANTO_ENDPOINT }}"],
    )
    data_dir: str = Field(
        default="", description="Folder of an embedded cluster. Empty: $CORANTO_DATA, otherwise ./.coranto."
    )
    file_root: str = Field(default="", description="Folder that file:/// fragment stores are rooted at.")
    prefix: str = Field(default="", description="Prefix of every journal name, such as 'rerun/'.")
    zone: str = Field(default="", description="Zone whose brokers are read from first. Empty: $CORANTO_ZONE.")


def resolve_cluster(context: dg.ResolutionContext, model: Any) -> JournalResource:
    """Return the resource of a cluster, with templates such as `{{ env.NAME }}` filled in."""
    return JournalResource(**resolve_fields(model, ClusterModel, context))


_resources: Final[dict[str, Any]] = {}


def shared_resource(kind: str, resource: dg.ConfigurableResource[Any]) -> tuple[str, Any]:
    """Return a key for a resource, and the one instance that all components with the same settings share.

    Dagster requires that equal keys mean the same object in a whole project. So the key contains a digest of the
    settings, and differs from keys that users choose.
    """
    settings = repr(sorted((name, str(value)) for name, value in vars(resource).items() if not name.startswith("_")))
    key = f"coranto_{kind}_{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
    return key, _resources.setdefault(key, resource)
