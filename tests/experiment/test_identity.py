"""Every field of every group decides the id of the run that reads it, or is listed here with the reason why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest
from beartype.roar import BeartypeCallHintViolation

from kvxfer.errors import KvxferError
from kvxfer.evals.kinds import KINDS
from kvxfer.evals.specs import SPECS, FullSpec, QuestionsSpec
from kvxfer.experiment.config import compose, to_settings
from kvxfer.experiment.identity import identity
from kvxfer.experiment.schema import DIALS, GROUPS
from kvxfer.fitting.closed import SOLVERS
from kvxfer.fitting.dials import PENALTIES, RANKS
from kvxfer.fitting.trained.specs import TRAINED, TrainerSpec
from kvxfer.maps.blocks import DESIGNS
from kvxfer.maps.plan import Plan
from kvxfer.models.spec import ModelSpec, PairSpec
from kvxfer.moments.spec import CalibrationSpec
from kvxfer.text.spec import CorpusSpec

NAME = "an option's name: what it sets decides"
PLACE = "where and how it is computed"
PART = "it decides as a part of something else: the models, the solver, the calibration"
INPUT = "a map that is an input of the run counts by its hash"
UNREAD = "another option of the group reads it; it is there so that grids over both compose"

DECIDES_NOT = {
    "pair.name": NAME,
    "pair.device": PLACE,
    **dict.fromkeys(("pair.drop_layers", "pair.features"), PART),
    "corpus.max_left_out": "what is read decides, by its content",
    "corpus.glob": "which files are read: their content decides",
    **dict.fromkeys(("corpus.num_shards", "corpus.shard_index"), "all shares together are one calibration"),
    "calibration.checkpoint_minutes": PLACE,
    **dict.fromkeys((f"solver.{name}.base" for name in TRAINED), "the name of the base that was really taken decides"),
    **dict.fromkeys((f"solver.{name}.base_map" for name in TRAINED), INPUT),
    "trainer.name": NAME,
    **{f"trainer.{key}": PLACE for key in ("cache_gib", "devices", "strategy", "accelerator")},
    "trainer.ckpt_path": "a checkpoint of the same question, which is checked",
    "penalty.isotropic.alpha": UNREAD,
    **dict.fromkeys(("rank.full.r", "rank.full.metric"), UNREAD),
    **{f"eval.{kind}.name": NAME for kind in SPECS if kind != "items"},
    "eval.multiturn.reverse_map": INPUT,
}
NO_QUESTION = {"logger": "where a run is told of", "paths": PLACE}
"""Groups of which nothing is asked."""

FILES = {"path": "two", "glob": "*.txt", "include_path": "two"}
"""Other values of fields that name files (in the fixture's folder)."""

_FIRST = ("other", "both", "greedy", "separate", "query", "layer", "one", "prefix", "relu", "gelu", "fit", "constant")
_WORDS = (*_FIRST, "bf16-mixed", "mapped", "attention", "none", "text", "up", "ridge", "toy")
"""Every field of text takes one of these that is not its own."""


def specs() -> Iterator[tuple[str, Any]]:
    """A spec of every option by its place in a config, made so that it reads all that it can."""
    yield "pair", PairSpec("p", ModelSpec("someone/small"), ModelSpec("someone/large"))
    yield "pair", PairSpec("p", ModelSpec("small"), ModelSpec("large"), random_weights=True, layers=2)
    yield "corpus", CorpusSpec("mine", "text", 32, path="one")
    yield "corpus", CorpusSpec("mine", "hub", 32, dataset="someone/text", num_shards=2)
    yield "calibration", CalibrationSpec(probe_rows=2, keep_layers=2, weights="attention")
    yield "features", DESIGNS["same"]
    yield "trainer", TrainerSpec()
    yield "plan", Plan()
    for name, option in (SOLVERS | TRAINED).items():
        yield f"solver.{name}", option(k="auto") if name in SOLVERS else option(name)
    for group, options in (("penalty", PENALTIES), ("rank", RANKS)):
        yield from ((f"{group}.{name}", option()) for name, option in options.items())
    yield "eval.items", QuestionsSpec("mine", choices=2)
    yield "eval.full", FullSpec("mine", ("standard",))
    yield from ((f"eval.{kind}", evaluation("mine")) for kind, evaluation in KINDS.items())


def others(value: Any, hint: Any) -> Iterator[Any]:
    """Other values of a field, some of which it may refuse."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (type(value)(value + 1), value / 2)
    for kind in get_args(hint) or (hint,):
        if kind in (int, float):
            yield from (kind(2), kind(0.5), kind(9))
        elif kind is str:
            yield from _WORDS
    if "tuple" in str(hint):
        yield from ((2, 3), (0.5,), *((word,) for word in _WORDS))


def changes(spec: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The spec with another value of each field, by the field's key; None where none is known."""
    for item in fields(spec):
        value, hint = getattr(spec, item.name), get_type_hints(type(spec))[item.name]
        if not item.init or (item.name in DIALS and hasattr(spec, "selection_lam")):
            continue
        if is_dataclass(value):
            below = changes(value, f"{prefix}{item.name}.")
            yield from ((key, other and replace(spec, **{item.name: other})) for key, other in below)
        else:
            given = [FILES[item.name]] if item.name in FILES else others(value, hint)
            yield f"{prefix}{item.name}", _other(spec, item.name, given)


def _other(spec: Any, name: str, values: Iterable[Any]) -> Any:
    for value in values:
        try:
            other = replace(spec, **{name: value})
        except (KvxferError, TypeError, BeartypeCallHintViolation):
            continue
        if getattr(other, name) != getattr(spec, name):
            return other
    return None


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool | None]:
    """Whether each key decides the identity of some spec of its option; None where no other value of it is known."""
    folder = tmp_path_factory.mktemp("texts")
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(f"text {name}")
        (folder / name / "tasks.yaml").write_text(f"task: {name}")
    found: dict[str, bool | None] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for place, spec in specs():
            for key, other in changes(spec, f"{place}."):
                changed = None if other is None else identity(other) != identity(spec)
                found[key] = found.get(key) or changed
    return found


def test_every_field_decides_or_has_a_reason_not_to(decided: dict[str, bool | None]) -> None:
    assert [key for key, decides in decided.items() if decides is None] == [], "give the test another value of these"
    assert {key for key, decides in decided.items() if not decides} == DECIDES_NOT.keys()


def test_every_key_of_a_config_is_walked(decided: dict[str, bool | None]) -> None:
    groups = {key.partition(".")[0] for key in decided}
    assert groups | NO_QUESTION.keys() == GROUPS.keys()
    assert {key.split(".")[1] for key in decided if key.startswith("eval.")} == SPECS.keys()
    for group in groups - {"eval"}:
        walked = {part for key in decided if key.startswith(f"{group}.") for part in key.split(".")}
        keys = {item.name for item in fields(GROUPS[group]) if not is_dataclass(item.type)}
        assert keys - {"name"} <= walked


def settings_of(*overrides: str) -> Any:
    return to_settings("evaluate", compose("evaluate", list(overrides)))


def asked(settings: Any) -> list[Any]:
    """The scientific configs of the moments, the map and the evaluation."""
    texts = [settings.read(each) for each in (settings.corpus, *settings.domains)]
    map_config = settings.solver_config
    return [settings.calibration_config(False), map_config, [settings.asked(), identity(settings.plan), texts]]


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (["logger=disabled", "paths.outputs=x", "force=true", "build_missing=false"], (False, False, False)),
        (["pair.dtype=bfloat16"], (True, False, False)),
        (["corpus.seed=1"], (True, False, True)),
        (["corpus.rows.fit=5"], (True, False, False)),
        (["corpus.rows.evaluation=5"], (False, False, True)),
        (["corpus.rows.training=5"], (False, False, False)),
        (["calibration.stride=2"], (True, False, False)),
        (["features=same"], (False, True, False)),
        (["solver.pool=2", "trainer.seed=1"], (False, True, False)),
        (["penalty.lam=1"], (False, True, False)),
        (["rank=reduced"], (False, True, False)),
        (["plan.exact_first=1"], (False, False, True)),
        (["eval.stories=3"], (False, False, True)),
        # The first pass cannot read more rows than there are.
        (["calibration.selection_rows=9"], (False, False, False)),
    ],
)
def test_a_run_hashes_what_it_reads(overrides: list[str], changed: tuple[bool, ...]) -> None:
    usual, other = asked(settings_of()), asked(settings_of(*overrides))
    assert tuple(a != b for a, b in zip(usual, other, strict=True)) == changed


def test_the_first_pass_reads_no_more_rows_than_there_are() -> None:
    of = ["corpus.rows.fit=8", "corpus.rows.validation=4", "calibration.keep_layers=3"]
    ids = [asked(settings_of(*of, f"calibration.selection_rows={rows}"))[0] for rows in (6, 8, 64)]
    assert ids[0] != ids[1] == ids[2]


def test_a_trained_map_asks_its_trainer() -> None:
    trained = [settings_of("solver=residual", f"trainer.seed={seed}").solver_config for seed in (0, 1)]
    assert trained[0] != trained[1]
