"""The cluster of a component, as YAML gives it, and the resources of components."""

import hashlib
from typing import Any, Final

import dagster as dg
from dagster.components.resolved.base import resolve_fields
from pydantic import Field

from dagster_coranto.resources.journals import JournalResource


class ClusterModel(dg.Model, dg.Resolvable):
    """A cluster of brokers. Empty fields come from the environment, tokens and certificates too: see JournalResource.

    Secrets have no field here, so that they are in no file.
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
    prefix: str = Field(default="", description="Put in front of every journal name, such as 'rerun/'.")
    zone: str = Field(default="", description="Zone whose brokers are read from first. Empty: $CORANTO_ZONE.")


def resolve_cluster(context: dg.ResolutionContext, model: Any) -> JournalResource:
    """Return the resource of a cluster, with templates such as `{{ env.NAME }}` filled in."""
    return JournalResource(**resolve_fields(model, ClusterModel, context))


_resources: Final[dict[str, Any]] = {}


def shared_resource(kind: str, resource: dg.ConfigurableResource[Any]) -> tuple[str, Any]:
    """Return a key for a resource, and the one resource that all components with the same settings use.

    Dagster wants equal keys to mean the same object in a whole project. So each component binds its own resources,
    under keys that differ by their settings and that no user chooses by chance.
    """
    settings = repr(sorted((name, str(value)) for name, value in vars(resource).items() if not name.startswith("_")))
    key = f"coranto_{kind}_{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
    return key, _resources.setdefault(key, resource)
