"""Every option of every group composes for every command, and becomes plain settings of the right types."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from omegaconf import OmegaConf

from kvxfer.errors import KvxferError
from kvxfer.experiment import schema
from kvxfer.experiment.config import compose, config_directory, to_settings
from kvxfer.maps.blocks import DESIGNS

GROUPS = {
    "calibrate": ("pair", "corpus", "calibration", "logger"),
    "train": ("pair", "corpus", "calibration", "logger", "features", "solver", "penalty", "rank", "trainer"),
    "evaluate": (
        "pair",
        "corpus",
        "calibration",
        "logger",
        "features",
        "solver",
        "penalty",
        "rank",
        "trainer",
        "plan",
        "eval",
    ),
}
NEEDED = {
    "eval=choices": ["corpus=pydoc"],
    "eval=mapped_choices": ["corpus=pydoc"],
    "pair=custom": ["pair.source.model=someone/small", "pair.target.model=someone/large"],
    "corpus=text": ["corpus.path=somewhere"],
}
# Every option with the command that has all groups, and every other command with every pair and one option of the rest.
CASES = [
    (stage, group, file.stem)
    for stage, groups in GROUPS.items()
    for group in groups
    for file in sorted((config_directory() / group).glob("*.yaml"))[
        : None if group == "pair" or stage == "evaluate" else 1
    ]
]


def settings_of(stage: str, *overrides: str) -> Any:
    return to_settings(stage, compose(stage, list(overrides)))


def test_every_group_is_tried():
    folders = {path.name for path in config_directory().iterdir() if path.is_dir()} - {"hydra"}
    assert folders == set(GROUPS["evaluate"])


@pytest.mark.parametrize(("stage", "group", "option"), CASES, ids=["-".join(case) for case in CASES])
def test_every_option_composes_and_becomes_settings(stage, group, option):
    choice = f"{group}={option}"
    cfg = compose(stage, [choice, *NEEDED.get(choice, [])])
    settings = to_settings(stage, cfg)
    name = OmegaConf.select(cfg, f"{group}.name")
    # calibration and logger have no name: nothing is called after them.
    assert name == (None if group in ("calibration", "logger") else option)
    if group == "pair":
        assert settings.pair.name == option
        kinds = {"toy": "toy", "geometry": "toy", "smollm2_healed": "stdlib", "smollm2_mild": "pydoc"}
        assert settings.corpus.kind == kinds.get(option, "hub")
        assert settings.calibration.features == DESIGNS[cfg.pair.features]
    if group == "pair" and stage != "calibrate":
        assert settings.solver.k == cfg.pair.k
        assert settings.solver.features == DESIGNS[cfg.pair.features]
    if group == "logger":
        assert settings.logger.wandb == option


@pytest.mark.parametrize("stage", GROUPS)
def test_defaults_are_the_toy_pair_on_files_and_offline(stage):
    settings = settings_of(stage)
    assert (settings.pair.label, settings.corpus.name, settings.logger.wandb) == ("toy", "toy", "offline")
    assert settings.outputs == Path("outputs")
    assert settings.logger.directory == "outputs"
    assert settings.force is False


def test_settings_are_plain_values():
    settings = settings_of("evaluate", "logger.tags=[a,b]", "calibration.layers=[2,0]", "penalty.lam=1")
    assert settings.logger.tags == ("a", "b")
    assert settings.calibration.layers == (2, 0)
    assert settings.solver.penalty.candidates == ({"lam": 1.0},)
    assert settings.corpus.rows.fit == 512
    modules = {type(value).__module__.split(".")[0] for value in vars(settings).values()}
    assert not modules & {"omegaconf", "hydra"}
    assert "omegaconf" not in str(settings.solver_config)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), ("5", 5), ("0", 0), ("auto", "auto"), ("1E2", 100.0), ("0.5", 0.5)]
)
def test_numbers_arrive_as_numbers(text, value):
    lam = settings_of("train", f"penalty.lam={text}").solver.penalty.lam
    assert lam == value
    # never an int: 1 and 1.0 are one question, with one run id
    assert type(lam) is (str if value == "auto" else float)


def test_1_and_1_0_are_one_question():
    config = settings_of("train", "solver.selection_lam=1").solver_config
    assert config == settings_of("train", "solver.selection_lam=1.0", "penalty.per_block=false").solver_config
    assert type(config["solver"]["selection_lam"]) is float
    settings = settings_of("train", "penalty.per_block=true", "solver.selection_lam=auto")
    assert settings.solver.penalty.per_block
    assert len(settings.solver.selection_lams) > 1


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["features=same"], "previous"),  # the toy pair's own richer design serves it
        (["pair.features=same", "features=both"], "both"),
        (["pair.features=same", "features=previous"], "previous"),
        (["calibration.features=same", "features=same"], "same"),
        (["features=layer0"], "previous+layer0"),
        (["features.random_relu=5", "features=both"], "previous+both random_relu=5"),
    ],
)
def test_calibration_keeps_what_the_map_asks_for(overrides, kept):
    assert settings_of("train", *overrides).calibration.features.name == kept


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["penalty=attention", "penalty.alpha=2"], r"penalty\.alpha=2\.0 must be"),
        (["penalty=attention", "penalty.lam=-1"], r"penalty\.lam=-1\.0 must be"),
        (["penalty=attention", "calibration.metrics=false"], r"calibration\.metrics=false.*calibration\.metrics=true"),
        (["rank=reduced", "rank.r=0"], r"rank\.r=0 must be"),
        (["rank=reduced", "rank.r=1.0"], r"rank\.r=1\.0 is the whole output width: use rank=full"),
        (["rank=reduced", "rank.metric=query"], r"rank\.metric='query'"),
        (["solver=head_local", "features=embedding"], "features=embedding has embedding: use solver=ridge"),
        (["solver.candidates=[ridge]"], r"solver\.candidates=\['ridge'\] has no effect with solver=ridge"),
        (["solver.k_per=head"], r"solver\.k_per='head' is none of pair, layer"),
        (["solver=auto", "solver.candidates=[luck]"], r"solver\.candidates has 'luck'"),
        (["solver=auto", "calibration.probe_rows=0"], r"calibration\.probe_rows=0.*calibration\.probe_rows=16"),
        (["solver.criterion=attention", "calibration.probe_rows=0"], r"solver\.criterion=attention.*probe_rows=16"),
        (["calibration.probe_rows=some"], r"calibration\.probe_rows=some must be a whole number"),
        (["calibration.probe_rows=1.5"], r"calibration\.probe_rows=1\.5 must be a whole number"),
        (["solver.k=some"], r"solver\.k=some must be"),
        (["solver.k=.nan"], r"solver\.k=\.?nan must be 1 or more source layers"),
        (["solver.k=inf"], r"solver\.k=inf must be 1 or more source layers"),
        (["solver.selection_lam=best"], r"solver\.selection_lam=best must be a number of 0 or more, or auto"),
        (["solver.selection_lam=.inf"], r"solver\.selection_lam=\.?inf must be"),
        (["solver.method=luck"], r"solver\.method='luck'"),
        (["features.random_relu=5"], r"features\.random_relu=5 has no effect with features=auto"),
        (["features=both", "features.previous=128"], r"features\.previous=128 reads .* corpus\.length=128 goes"),
        (["features=both", "features.target_embedding=200"], r"features\.target_embedding=200 reads further back"),
        (["features=both", "features.target_embedding=-1"], r"features\.target_embedding=-1 must be"),
    ],
)
def test_wrong_dials_are_one_line(overrides, message):
    with pytest.raises(KvxferError, match=message) as refusal:
        settings_of("train", *overrides)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "dials"),
    [
        (["penalty=attention", "penalty.alpha=1", "solver.k=2.0"], {"k": 2, "lam": "auto", "alpha": 1.0, "r": None}),
        (["rank=reduced", "rank.r=8.0"], {"k": 3, "lam": "auto", "alpha": None, "r": 8}),
        (["rank=reduced", "rank.r=0.5", "solver.k=auto"], {"k": "auto", "lam": "auto", "alpha": None, "r": 0.5}),
        (["penalty.alpha=0.5", "rank.r=3"], {"k": 3, "lam": "auto", "alpha": None, "r": None}),
    ],
)
def test_dials_are_one_question_however_they_are_written(overrides, dials):
    columns = settings_of("train", *overrides).columns()
    assert {key: columns[key] for key in dials} == dials
    assert all(type(columns[key]) is type(value) for key, value in dials.items())


def test_a_group_set_by_hand_wins_over_the_sweep():
    assert to_settings("train", compose("train", []), group="sweep").logger.group == "sweep"
    assert to_settings("train", compose("train", ["logger.group=mine"]), group="sweep").logger.group == "mine"


def test_what_does_not_decide_numbers_does_not_decide_ids(monkeypatch):
    from kvxfer.experiment.stages.calibrate import calibration_id

    monkeypatch.setattr("kvxfer.experiment.pins.pinned", lambda pair, outputs: pair)  # there is no hub here
    base = calibration_id(settings_of("calibrate", "pair=qwen3_1.7b_4b"))
    for same in (
        "pair.device=cpu",
        "logger=online",
        "paths.outputs=x",
        "calibration.checkpoint_minutes=1",
        "verify=true",
    ):
        assert calibration_id(settings_of("calibrate", "pair=qwen3_1.7b_4b", same)) == base
    for unread in ("corpus.rows.evaluation=7", "corpus.rows.training=7"):
        assert calibration_id(settings_of("train", "pair=qwen3_1.7b_4b", unread)) == base
    for other in ("pair.dtype=float32", "pair.target.revision=abc", "corpus.seed=1", "pair.reverse=true"):
        assert calibration_id(settings_of("calibrate", "pair=qwen3_1.7b_4b", other)) != base


def test_a_config_of_another_stage_is_refused():
    with pytest.raises(KvxferError, match="not one of the train stage"):
        to_settings("train", compose("calibrate", []))


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ([], 0),
        (["solver=auto"], 16),
        (["solver=head_local", "solver.criterion=attention"], 16),
        (["solver=auto", "calibration.probe_rows=3.0"], 3),
        (["calibration.probe_rows=5"], 5),
    ],
)
def test_a_probe_is_kept_where_the_solver_needs_one(overrides, rows):
    from kvxfer.experiment.stages.calibrate import calibration_id

    settings = settings_of("train", *overrides)
    assert settings.calibration.probe_rows == rows
    assert type(settings.calibration.probe_rows) is int
    weights = ["calibration.weights=attention"] if "solver=auto" in overrides else []
    plain = settings_of("calibrate", *([f"calibration.probe_rows={rows}"] if rows else []), *weights)
    assert calibration_id(settings) == calibration_id(plain)
    assert (calibration_id(settings) == calibration_id(settings_of("train"))) == (rows == 0)


def test_all_source_layers_are_one_question_whatever_k_is():
    asked = (["solver.k=1"], ["solver.k=auto", "solver.k_per=layer"], ["solver.k=2", "solver=corrected"])
    one, auto, base = (settings_of("train", "solver.method=all", *own).base() for own in asked)
    assert one.solver_config == auto.solver_config == base.solver_config
    assert one.columns()["k"] is None


def test_the_toy_has_questions_of_its_own():
    with pytest.raises(KvxferError, match="asks which text follows, and corpus=toy has questions of its own"):
        settings_of("evaluate", "eval=choices")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["calibration.features=relu", "features=relu", "features.random_relu=500"],
            "does not keep what features=relu",
        ),
        (["calibration.features=same", "features=both"], "does not keep what features=both reads"),
        (["calibration.weight_clip=inf"], "must be 1 or more"),
        (["calibration.probe_rows=.nan"], "must be a whole number of rows"),
        (["calibration.probe_rows=.inf"], "must be a whole number of rows"),
    ],
)
def test_a_calibration_that_cannot_serve_is_refused_before_it_is_made(overrides, message):
    with pytest.raises(KvxferError, match=message):
        settings_of("train", *overrides)


def test_designs_are_named_in_any_order():
    first, second = (settings_of("calibrate", f"calibration.features={f}") for f in ("relu+both", "both+relu"))
    assert first.calibration == second.calibration


def test_auto_leaves_weights_out_where_they_are_not_wanted():
    assert settings_of("train", "solver=auto", "calibration.weights=none").calibration.weights == "none"
    with pytest.raises(KvxferError, match="set calibration"):
        settings_of("train", "solver=weighted", "calibration.weights=none")


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["features=both", "features.previous=1"], "previous"),
        (["features=relu", "features.random_relu=0"], "both"),
        (["features=both", "features.previous=2"], "both previous=2"),
        (["features=rich", "features.target_layer0=true"], "rich target_layer0=true"),
        (["features=previous", "features.kinds=same"], "previous kinds=same"),
    ],
)
def test_a_changed_design_is_another_design(overrides, name):
    """The option's own name would make two designs one in a table, and one design two."""
    settings = settings_of("train", *overrides)
    assert settings.solver.features.name == settings.columns()["features"] == name
    if name in DESIGNS:
        assert settings.solver_config == settings_of("train", f"features={name}").solver_config


def test_schemas_are_sent_to_workers_by_name() -> None:
    """A copy, as a pickle of a class without a place holds one, would break the original in the same process."""
    for group in (schema.SCHEMAS, schema.EVALS, schema.GROUPS):
        for each in group.values():
            assert pickle.loads(cloudpickle.dumps(each)) is each
