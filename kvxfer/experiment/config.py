"""Composed configs and the way from them to plain dataclasses. Only this module and ``schema`` know OmegaConf."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from kvxfer.errors import KvxferError, NotApplicable
from kvxfer.experiment.schema import EVALS, GROUPS, SCHEMAS
from kvxfer.experiment.wandb_outside import by_agent

if TYPE_CHECKING:
    from kvxfer.experiment.settings import CalibrateSettings, EvaluateSettings, TrainSettings


def register(stage: str | None = None) -> None:
    """Make the schemas known to Hydra under ``base_<stage>``, and the running command's config under ``stage``.

    A grid that builds on ``stage`` serves every command.
    """
    _register_schemas()
    if stage is not None:
        ConfigStore.instance().store(name="stage", node={"defaults": [stage, "_self_"]})


@functools.cache
def _register_schemas() -> None:
    """Once a process: a third of the time of composing a config."""
    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(name=f"base_{name}", node=schema)
    for kind, node in EVALS.items():
        store.store(group="schema/eval", name=kind, node=node)


def config_directory() -> Path:
    """Where the YAML options are: beside the package in a checkout, inside it in a wheel."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "configs"


_MODEL = re.compile(r"(pair\.(?:source|target))=(?!\{)(.+)", re.DOTALL)
_RUN_IDS = re.compile(r"((?:eval\.|solver\.)?(?:\w+_)?map)=([0-9a-f]{12}(?:,[0-9a-f]{12})*)")


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """The command line as it is meant.

    ``pair.source=x`` (one model or, in a sweep, several) is ``pair.source.model=x``, and the ids of runs are quoted:
    one of digits and an e would be a number.
    """
    found = []
    for argument in arguments:
        if (match := _MODEL.fullmatch(argument)) is not None:
            argument = f"{match[1]}.model={match[2]}"
        elif (match := _RUN_IDS.fullmatch(argument)) is not None:
            argument = f"{match[1]}=" + ",".join(f"'{each}'" for each in match[2].split(","))
        found.append(argument)
    return found


def compose(stage: str, overrides: list[str]) -> DictConfig:
    """The config of a stage as its command line would compose it; within a command, from where it looks itself."""
    register()
    if GlobalHydra.instance().is_initialized():
        return hydra_compose(stage, spelled_out(overrides))
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        return hydra_compose(stage, spelled_out(overrides))


def _refuse_unknown_keys(conf: Any, prefix: str) -> None:
    """``+key=value`` adds keys that no schema has: they would be ignored, or break something far from here."""
    known = [item.name for item in fields(conf)]
    for key, value in vars(conf).items():
        if key not in known:
            raise KvxferError(f"{prefix}{key}: no such key; {prefix or 'the config '}has {', '.join(known)}")
        if is_dataclass(value):
            _refuse_unknown_keys(value, f"{prefix}{key}.")


def to_settings(
    stage: str, cfg: DictConfig, group: str | None = None
) -> CalibrateSettings | TrainSettings | EvaluateSettings:
    """Plain, validated settings of a composed config.

    Args:
        group: the W&B group of a multirun; ``logger.group`` wins over it.

    Raises:
        KvxferError: a value is missing or makes no sense; the message names its key.
    """
    from kvxfer.experiment import settings

    try:
        conf: Any = OmegaConf.to_object(cfg)
    except MissingMandatoryValue as error:
        raise KvxferError(f"{error.full_key} is not set: give it a value with {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise KvxferError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    schema: Any = SCHEMAS[stage]
    if not isinstance(conf, schema):
        raise KvxferError(f"the config (-cn) is not one of the {stage} stage: choose one that builds on {stage}")
    _refuse_unknown_keys(conf, "")
    if conf.logger.group is None:
        conf.logger.group = group
    if stage == "evaluate":
        asked: Any = vars(conf)["eval"]
        domains, parts = _domains(getattr(asked, "domains", [])), _parts(cfg, getattr(asked, "parts", []), group)
        return settings.evaluate(conf, domains, parts)
    build = {"calibrate": settings.calibrate, "train": settings.train}
    return build[stage](conf)


def refuse_in_multirun(settings: CalibrateSettings) -> None:
    """Refuse a job of a multirun that trains on several devices, each of whose processes would run the whole grid, and
    one that a W&B agent started, whose runs would all have one id.
    """
    if settings.logger.mode != "disabled" and by_agent():
        raise KvxferError(
            "-m under a W&B agent (WANDB_SWEEP_ID is set), whose trial is one job: leave out -m, or set logger=disabled"
        )
    training = getattr(settings, "training", None)
    if training is not None and training.trainer.devices > 1:
        raise KvxferError(
            f"trainer.devices={training.trainer.devices} in a multirun, where every job trains on one device: "
            "set trainer.devices=1, or give the job as a command of its own"
        )


def _domains(names: Sequence[str]) -> list[Any]:
    """The options of group ``corpus`` that ``eval.domains`` names."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise KvxferError(f"eval.domains names {', '.join(twice)} more than once; name every text once")
    return [corpus_option(name) for name in names]


def corpus_option(name: str) -> Any:
    """An option of group ``corpus`` by itself, typed: an evaluation may read more texts than the run's own."""
    file = config_directory() / "corpus" / f"{name}.yaml"
    if not file.is_file():
        options = ", ".join(sorted(each.stem for each in file.parent.glob("*.yaml")))
        raise KvxferError(f"eval.domains: {name!r} is no option of corpus; there are {options}")
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GROUPS["corpus"]), OmegaConf.load(file)))


def _parts(cfg: DictConfig, names: Sequence[str], group: str | None) -> dict[str, EvaluateSettings | NotApplicable]:
    """The settings of every evaluation that ``eval.parts`` names: the config with that option, or why there is none."""
    found: dict[str, EvaluateSettings | NotApplicable] = {}
    for name in names:
        part = copy.deepcopy(cfg)
        with flag_override(part, ["struct", "readonly"], False):
            part.eval = _eval_option(name)
        try:
            found[name] = cast("EvaluateSettings", to_settings("evaluate", part, group))
        except NotApplicable as reason:
            found[name] = reason
    return found


def _eval_option(name: str) -> DictConfig:
    """An option of group ``eval`` by itself, with what it builds on."""
    options = sorted(each.stem for each in (config_directory() / "eval").glob("*.yaml"))
    if name not in options or name == "full":
        rest = ", ".join(option for option in options if option != "full")
        raise KvxferError(f"eval.parts: {name!r} is no option of eval that can be a part; there are {rest}")
    return cast(DictConfig, compose("evaluate", [f"eval={name}"])["eval"])


def job_config(cfg: DictConfig) -> DictConfig:
    """A composed config without Hydra's own part, every value resolved."""
    result = copy.deepcopy(cfg)
    with flag_override(result, ["struct", "readonly"], False):
        result.pop("hydra", None)
        values = OmegaConf.to_container(result, resolve=True)
        if (literal := _literal(values)) == values:
            OmegaConf.resolve(result)
            return result
        merged = OmegaConf.merge(result, literal)
    return cast(DictConfig, merged)


def _literal(value: Any) -> Any:
    """A plain value as a config in which it stays what it is: ``${`` in a text is escaped."""
    if isinstance(value, dict):
        return {key: _literal(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_literal(each) for each in value]
    return re.sub(r"(\\*)\$\{", lambda m: 2 * m[1] + r"\${", value) if isinstance(value, str) else value


def quoted(text: str) -> str:
    """A text as the value of an override, whatever is in it."""
    return QuotedString(_literal(text), Quote.single).with_quotes()


def stage_of(cfg: DictConfig) -> str | None:
    """The stage whose schema a config has."""
    schema = OmegaConf.get_type(cfg)
    return next((stage for stage, known in SCHEMAS.items() if known is schema), None)


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A config as plain dicts and lists."""
    result: Any = OmegaConf.to_container(cfg, resolve=True)
    return result


def value_of(cfg: DictConfig, key: str, text: str) -> bool | int | float | str | None:
    """The value of an override's key in the config that it was composed into; of a group, the option's name."""
    value = OmegaConf.select(cfg, key.lstrip("+"), default=text)
    return value if value is None or isinstance(value, bool | int | float | str) else text


def save_job(file: Path, label: str, cfg: DictConfig) -> None:
    """Keep the config of a sweep's job under its label."""
    file.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(_literal({"job": label, "config": plain(cfg)})), file)


def load_job(stage: str, file: Path) -> tuple[str, DictConfig]:
    """The label and the config of a sweep's job, typed as the stage's schema."""
    saved = OmegaConf.load(file)
    schema = OmegaConf.structured(SCHEMAS[stage])
    if stage == "evaluate":
        schema.eval = EVALS[saved.config.eval.kind]()
    config = OmegaConf.merge(schema, saved.config)
    assert isinstance(config, DictConfig)
    return str(saved.job), config
