"""Hydra reads the same options once in a process: most small runs and wrong command lines differ in values alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.config_store import ConfigStore


def _read_from(repo: Any) -> Any:
    """The folders, and the one entry of Hydra's store that a command changes: what ``stage`` is."""
    stage = ConfigStore.instance().repo.get("stage.yaml")
    return [(source.provider, source.path) for source in repo.get_sources()], stage and repr(stage.node)


@contextmanager
def composed_once() -> Iterator[None]:
    """Inside the block a choice of options, read from the same folders, is put together once and then copied.

    Command lines are parsed, checked and applied by Hydra as ever.
    """
    list_options, merge = defaults_list._create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
    lists: dict[Any, Any] = {}
    configs: dict[Any, Any] = {}

    def listed(repo: Any, config_name: Any, overrides: Any, prepend_hydra: bool, skip_missing: bool) -> Any:
        given = (overrides.override_choices, overrides.append_group_defaults, overrides.deletions)
        key = repr((_read_from(repo), config_name, given, prepend_hydra, skip_missing))
        if key not in lists:
            found = list_options(repo, config_name, overrides, prepend_hydra=prepend_hydra, skip_missing=skip_missing)
            # What the list was made with says afterwards which of its options were there, for the errors of the rest.
            said = {name: value for name, value in vars(overrides).items() if name != "config_overrides"}
            lists[key] = copy.deepcopy((found, said))
        found, said = copy.deepcopy(lists[key])
        vars(overrides).update(said)
        return found

    def merged(self: Any, defaults: Any, repo: Any) -> Any:
        key = repr((_read_from(repo), [(d.config_path, d.parent, d.package, d.is_self, d.primary) for d in defaults]))
        if key not in configs:
            configs[key] = merge(self, defaults, repo)
        return copy.deepcopy(configs[key])

    def without_copying_schemas(self: Any, delegate: Any) -> None:
        self.delegate, self.cache = copy.copy(delegate), {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachingConfigRepository, "__init__", without_copying_schemas)
        patch.setattr(defaults_list, "_create_defaults_list", listed)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merged)
        yield
