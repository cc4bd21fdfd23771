"""Hook that creates clients from an Airflow connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException, BaseHook

from airflow_coranto.connection import (
    CONNECTION_TYPE,
    DEFAULT_CONNECTION,
    ConnectionFields,
    how_to_define,
    with_connection_fields,
)
from airflow_coranto.get_provider_info import CONNECTION_FIELDS, FIELD_BEHAVIOUR
from coranto.errors import CorantoError

if TYPE_CHECKING:
    from coranto.client import ClientConfig, SyncJournalClient


class CorantoHook(BaseHook):
    """Hook for the cluster of brokers of a connection (see `ConnectionFields` for its fields).

    The connection is read each time, so that a changed token or the new port of an embedded cluster takes effect
    immediately. An undefined connection is an error, even if a cluster runs on this machine: Airflow also reports a
    connection as undefined if its lookup failed, and the task must not use another cluster then.
    """

    conn_name_attr = "coranto_conn_id"
    default_conn_name = DEFAULT_CONNECTION
    conn_type = CONNECTION_TYPE
    hook_name = "Coranto"

    def __init__(self, coranto_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.coranto_conn_id = coranto_conn_id

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Return the labels, placeholders and hidden fields of Airflow's connection form."""
        return {name.replace("-", "_"): value for name, value in FIELD_BEHAVIOUR.items()}

    @classmethod
    def get_connection_form_widgets(cls) -> dict[str, Any]:
        """Return the additional form fields for Airflow before 3.2. Later versions read `get_provider_info`."""
        from flask_appbuilder.fieldwidgets import BS3TextFieldWidget
        from flask_babel import lazy_gettext
        from wtforms import StringField

        return {
            name: StringField(lazy_gettext(field["label"]), widget=BS3TextFieldWidget())
            for name, field in CONNECTION_FIELDS.items()
        }

    def fields(self) -> ConnectionFields:
        """Return the connection's fields. Raises AirflowNotFoundException if the connection is undefined."""
        try:
            return _fields(self.get_connection(self.coranto_conn_id))
        except AirflowNotFoundException as error:
            raise AirflowNotFoundException(how_to_define(self.coranto_conn_id)) from error

    async def async_fields(self) -> ConnectionFields:
        """Return the connection's fields, in a trigger. Raises as `fields` does."""
        try:
            if hasattr(BaseHook, "aget_connection"):
                return _fields(await self.aget_connection(self.coranto_conn_id))
            from asgiref.sync import sync_to_async

            return _fields(await sync_to_async(self.get_connection)(self.coranto_conn_id))
        except AirflowNotFoundException as error:
            raise AirflowNotFoundException(how_to_define(self.coranto_conn_id)) from error

    def client_config(self) -> ClientConfig:
        """Return the configuration of a client. Raises InvalidInput and ClusterError."""
        return self.fields().client_config()

    def get_conn(self) -> SyncJournalClient:
        """Return a client. Close it, or use it as a context manager."""
        from coranto.client import SyncJournalClient

        return SyncJournalClient.of(self.client_config())

    def cluster_name(self) -> str:
        """Return the cluster's name in asset URIs and lineage."""
        return self.fields().cluster_name(self.coranto_conn_id)

    def test_connection(self) -> tuple[bool, str]:
        """List the journals, for the button "Test" of a connection."""
        try:
            with self.get_conn() as client:
                return True, f"the cluster has {len(client.list().journals)} journals"
        except CorantoError as error:
            return False, with_connection_fields(str(error))


def _fields(connection: Any) -> ConnectionFields:
    return ConnectionFields(
        host=connection.host or "",
        port=connection.port,
        schema=connection.schema or "",
        login=connection.login or "",
        password=connection.password or "",
        extra=connection.extra_dejson,
    )
