"""Configs of many jobs, each choice of options composed once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser


class Composer:
    """Composes what Hydra would, many configs in the time of a few.

    Reading and merging the options takes Hydra nearly all of its time, and values are put into the result in the end.
    Configs of the same options therefore share one composition, and each puts its own values into a copy.
    """

    def __init__(self, loader: Any, compose: Callable[[list[str]], Any]) -> None:
        """``compose`` makes a config of overrides, and ``loader`` is where it looks options up."""
        self.loader, self.by_options = loader, compose
        self.parser = OverridesParser.create(config_loader=loader)
        self.chosen: dict[tuple[str, ...], Any] = {}

    def compose(self, overrides: list[str]) -> Any:
        """One config; raises what Hydra does about a wrong option, key or type."""
        parsed = self.parser.parse_overrides(overrides)
        # As Hydra tells values from options.
        exists = self.loader.repository.group_exists
        values = [each for each in parsed if isinstance(each.value(), dict) or not exists(each.key_or_group)]
        options = tuple(str(each.input_line) for each in parsed if each not in values)
        if options not in self.chosen:
            self.chosen[options] = self.by_options(list(options))
        config = copy.deepcopy(self.chosen[options])
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        if "hydra" in config:
            asked = [each for each in parsed if not each.is_hydra_override()]
            config.hydra.overrides.task = [each.input_line for each in asked]
            config.hydra.job.override_dirname = get_overrides_dirname(asked, **config.hydra.job.config.override_dirname)
        return config
