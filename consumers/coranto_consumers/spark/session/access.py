"""Tokens for tasks. Keys stay in the driver; tasks get tokens for the journals that they read or write."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from coranto.client import ClientConfig
from coranto.labels import NAME
from coranto.security.tokens import BearerToken, Capability, Claims, Keys, Secret, scope_of, sign
from coranto.wire import protocol_pb2 as pb

DEFAULT_TOKEN_SECONDS: Final = 6 * 3600.0
"""The lifetime of a task's token in seconds. No stage should take longer."""
_MAX_SCOPE_BYTES: Final = 1536
"""The size limit for selectors in tokens, which are sent with each call."""


def for_tasks(
    config: ClientConfig,
    capability: Capability,
    journals: Iterable[str] | pb.LabelSelector,
    seconds: float = DEFAULT_TOKEN_SECONDS,
) -> ClientConfig:
    """Return the configuration for tasks, with a token instead of keys.

    The token is for `journals`, or for their folders if the token would be too large.
    """
    if not isinstance(config.auth, Keys):
        return config
    scope = journals if isinstance(journals, pb.LabelSelector) else _scope(journals)
    now = time.time()
    token = sign(Claims(capability, scope, now, now + seconds), config.auth)
    return replace(config, auth=BearerToken(Secret(token)))


def without_keys(config: ClientConfig) -> ClientConfig:
    return replace(config, auth=None) if isinstance(config.auth, Keys) else config


def _scope(journals: Iterable[str]) -> pb.LabelSelector:
    names = set(journals)
    scope = scope_of(names)
    folders = {name.rpartition("/")[0] for name in names}
    while scope.ByteSize() > _MAX_SCOPE_BYTES:
        if "" in folders:
            return pb.LabelSelector()
        labels = [pb.Label(name=NAME, value=f"{folder}/", prefix=True) for folder in sorted(folders)]
        scope = pb.LabelSelector(include=pb.LabelSet(labels=labels))
        folders = {folder.rpartition("/")[0] for folder in folders}
    return scope
