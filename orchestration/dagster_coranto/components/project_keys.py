"""Keys of assets and checks that are defined elsewhere in a project, and that a collection of journals omits.

Dagster rejects two definitions of one key. A collection includes every existing journal. Other parts of the project may
publish to some of these journals or audit them, and their definitions have more detail.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import dagster as dg


@dataclass(frozen=True, slots=True)
class ProjectKeys:
    """Keys of assets and checks that other parts of a project define."""

    assets: set[dg.AssetKey] = field(default_factory=set)
    checks: set[dg.AssetCheckKey] = field(default_factory=set)

    def add(self, defs: dg.Definitions) -> None:
        """Add the keys of definitions."""
        for each in (*(defs.assets or ()), *(defs.asset_checks or ())):
            if isinstance(each, dg.AssetsDefinition):  # Checks are such definitions, too.
                self.assets.update(each.keys)
                self.checks.update(each.check_keys)
            elif isinstance(each, dg.AssetSpec | dg.SourceAsset):
                self.assets.add(each.key)


def keys_of_other_components(context: dg.ComponentLoadContext, excluded: type[dg.Component]) -> ProjectKeys:
    """Return the keys that a component's project defines outside of components of the class `excluded`.

    Dagster caches the definitions that this loads, so each part is loaded once. Returns no keys for a component that is
    loaded without a project (`dg.build_defs_for_component`).
    """
    found = ProjectKeys()
    tree: Any = context.component_tree
    if not isinstance(tree.defs_module, ModuleType):
        return found
    for part in _parts(tree.find_root_decl(), excluded):
        # Dagster 1.12 calls a part's location its path.
        found.add(tree.build_defs_at_path(getattr(part, "loc", None) or part.path))
    return found


def _parts(declared: Any, excluded: type[dg.Component]) -> Iterator[Any]:
    """Yield the largest parts of a project that contain no component of the class `excluded`."""
    if issubclass(declared.component_type, excluded):
        return
    if not _has(declared, excluded):
        yield declared
        return
    for child in declared.iterate_child_component_decls():
        yield from _parts(child, excluded)


def _has(declared: Any, kind: type[dg.Component]) -> bool:
    return any(issubclass(each.component_type, kind) for each in declared.iterate_all_component_decls())
