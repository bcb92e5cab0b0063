"""eval=lm_eval from local files: the same questions under every condition; what can't be asked is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from kvxfer.errors import KvxferError
from kvxfer.evals.benchmarks import tasks as harness_tasks
from kvxfer.evals.benchmarks.benchmarks import Benchmarks
from kvxfer.evals.benchmarks.tasks import write_toy_tasks
from kvxfer.evals.conditions import Prepared
from kvxfer.evals.items import toy_items
from kvxfer.evals.scoring import score
from kvxfer.evals.specs import TOY_TASKS, harness_version
from kvxfer.evals.statistics import holm, summarise_scores
from kvxfer.experiment.identity import identity
from kvxfer.report.full import measured
from kvxfer.report.kinds import REPORTS
from kvxfer.report.rendering import render
from kvxfer.report.verdict import Verdict
from tests.harness_pairs import own_model
from tests.small_runs import results_of, run, settings_of, toy_models

pytestmark = pytest.mark.draws

LENGTH = 48  # of the stories of small runs
OWN = ["eval=lm_eval", "eval.batch_size=4"]


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A group of two tasks with choices of unequal length, and one whose answers score between 0 and 1."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = [
        {"asked": f"anna kitchen . ben {place} . where ben", "choices": [place, "hot tea", "sweet fish"], "gold": n % 3}
        for n, place in enumerate(("garden", "attic", "cellar", "office", "museum", "school"))
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "fewshot_split": "test",
        "doc_to_text": "{{asked}}",
        "metadata": {"version": 2.5},
    }
    choices = {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": name, "higher_is_better": True} for name in ("acc", "acc_norm")],
    }
    tasks: list[dict[str, Any]] = [
        {"task": "own_one", **common, **choices},
        {"task": "own_two", **common, **choices, "num_fewshot": 1},
        {"task": "own_texts", **common, "output_type": "loglikelihood_rolling", "doc_to_target": "{{asked}}"},
        {"task": "own_download", **common, **choices, "dataset_path": "nobody/nothing", "dataset_kwargs": None},
        {
            "group": "own_group",
            "task": ["own_one", "own_two"],
            "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        },
    ]
    for number, task in enumerate(tasks):
        (folder / f"{number}.yaml").write_text(json.dumps(task))
    return folder


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module", autouse=True)
def few_stories() -> Iterator[None]:
    """Enough for what is asked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness_tasks, "STORIES", dict.fromkeys(TOY_TASKS, 3))
        yield


@pytest.fixture(scope="module")
def toy(tiny_folders: tuple[Path, Path], outputs: Path) -> Path:
    return run("evaluate", outputs, *toy_models(tiny_folders), *OWN, "eval.limit=8")


@pytest.fixture(scope="module")
def own(tiny_folders: tuple[Path, Path], outputs: Path, own_tasks: Path) -> Path:
    tasks = [f"eval.include_path={own_tasks}", "eval.tasks=[own_group]", "eval.log_samples=false"]
    return run("evaluate", outputs, *toy_models(tiny_folders), *OWN, *tasks)


def test_the_report_is_made_from_the_json_alone_and_says_how_it_was_asked(toy):
    results = results_of(toy)
    report = (toy / "report.md").read_text()
    assert report == render(results)
    assert f"lm-evaluation-harness {harness_version()}, the first 8 samples of every task" in report
    assert (toy / "figures" / "lm_eval_benchmarks.png").is_file()
    logged = REPORTS["lm_eval"].metrics(results["data"])
    assert logged["toy_choices/mapped/score"] == results["data"]["benchmarks"][0]["conditions"]["mapped"]["accuracy"]


def test_benchmarks_are_tasks_of_a_full_report(toy):
    rows = measured("lm_eval", results_of(toy), 1.0)["tasks"]
    assert [row["task"] for row in rows] == ["toy_choices", "toy_answers"]
    conditions = results_of(toy)["data"]["benchmarks"][0]["conditions"]
    assert rows[0]["mapped"] == conditions["mapped"]["accuracy"]
    assert rows[0]["retention_ci"] == conditions["mapped"]["retention_ci"]


def test_toy_choices_are_the_questions_of_eval_standard(toy, tiny_pair):
    """Chosen by the items' own scoring, for both models."""
    benchmark = results_of(toy)["data"]["benchmarks"][0]
    items = toy_items(tiny_pair.tokenizer, LENGTH, stories=2, questions=5, seed=0)[:8]
    assert [sample["document"] for sample in benchmark["samples"]] == [item.document for item in items]
    assert benchmark["chance"] == pytest.approx(np.mean([1 / len(item.candidates) for item in items]))
    for condition, model in (("ceiling", tiny_pair.target), ("source", tiny_pair.source)):
        chosen = [score(Prepared(model, None, torch.tensor([i.prompt])), [i], None)[0].correct for i in items]
        assert [sample["scores"]["acc"][condition] for sample in benchmark["samples"]] == [float(c) for c in chosen]


def test_the_harness_itself_finds_the_same_ceiling(toy, tiny_pair, tmp_path):
    """Its own entry point with its own model, on the same tasks."""
    from lm_eval.tasks import TaskManager

    write_toy_tasks(tmp_path, tiny_pair.tokenizer, LENGTH)
    tasks = harness_tasks.load_tasks(TOY_TASKS, [tmp_path], None, 1234)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    assert set(TOY_TASKS) == set(manager.all_tasks)
    found = harness_tasks.run_tasks(tasks, own_model(tiny_pair, 4), 8, 1234)
    for benchmark in results_of(toy)["data"]["benchmarks"]:
        key = f"{benchmark['measure']},{benchmark['filter']}"
        assert found["results"][benchmark["name"]][key] == benchmark["conditions"]["ceiling"]["accuracy"]
        theirs = [sample["filtered_resps"] for sample in found["samples"][benchmark["name"]]]
        ours = [sample["answers"]["ceiling"] for sample in benchmark["samples"]]
        if benchmark["kind"] == "generate_until":
            assert ours == theirs
        else:
            for row, other in zip(ours, theirs, strict=True):
                assert [nats for nats, _ in row] == pytest.approx([nats for nats, _ in other], abs=1e-4)


def test_toy_tasks_ask_about_other_stories_each(toy):
    documents = [{s["document"] for s in each["samples"]} for each in results_of(toy)["data"]["benchmarks"]]
    assert not documents[0] & documents[1]


def test_a_group_counts_every_sample_and_keeps_what_its_tasks_scored(own):
    [benchmark] = results_of(own)["data"]["benchmarks"]
    assert (benchmark["name"], benchmark["n"], benchmark["shots"]) == ("own_group", 12, "0, 1")
    assert benchmark["versions"] == {"own_one": 2.5, "own_two": 2.5}
    assert benchmark["chance"] == pytest.approx(1 / 3)
    for condition, row in benchmark["conditions"].items():
        assert row["accuracy"] == pytest.approx(np.mean([each[condition] for each in benchmark["members"].values()]))
    assert set(benchmark["others"]) == {"acc_norm"}
    assert "answers" not in benchmark["samples"][0]


def test_own_tasks_are_known_by_their_content(own_tasks, tmp_path):
    def known() -> dict[str, Any]:
        return identity(Benchmarks("lm_eval", tasks=("own_one",), include_path=str(own_tasks)))

    before = known()
    assert str(own_tasks) not in str(before)
    assert before["tasks"]["harness"] == harness_version()
    file = own_tasks / "data.jsonl"
    kept = file.read_text()
    file.write_text(kept + "\n")
    assert known() != before
    file.write_text(kept)


def random_scores(values: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    chances = {"ceiling": 0.9, "source": 0.5, "mapped": 0.8, "floor": 0.3}
    right = {name: (draw.random(200) < p).astype(float) for name, p in chances.items()}
    return right if values == 2 else {name: (each + draw.integers(0, 3, 200)) / 3 for name, each in right.items()}


def test_tests_and_ratios_agree_with_independent_arithmetic():
    scores, chance = random_scores(2), np.full(200, 0.25)
    found = summarise_scores(scores, chance, [str(n) for n in range(200)])
    m, s, c = (scores[name] for name in ("mapped", "source", "ceiling"))
    only_m, only_s = int(((m == 1) & (s == 0)).sum()), int(((m == 0) & (s == 1)).sum())
    p = stats.binomtest(only_m, only_m + only_s).pvalue
    assert found["tests"]["mapped_vs_source"]["accuracy_p"] == pytest.approx(p)
    assert found["tests"]["mapped_vs_source"]["test"] == "mcnemar"
    row = found["conditions"]["mapped"]
    assert row["retention_floor_normalised"] == pytest.approx((m.mean() - 0.25) / (c.mean() - 0.25))
    assert row["gap_recovered"] == pytest.approx((m.mean() - s.mean()) / (c.mean() - s.mean()))
    low, high = row["accuracy_ci"]
    assert low < row["accuracy"] < high


def test_scores_between_0_and_1_have_a_paired_t_test():
    scores = random_scores(3)
    found = summarise_scores(scores, np.zeros(200), [str(n) for n in range(200)])["tests"]["mapped_vs_source"]
    assert found["test"] == "paired_t"
    assert found["accuracy_p"] == pytest.approx(stats.ttest_rel(scores["mapped"], scores["source"]).pvalue)


def data_of(*scores: dict[str, np.ndarray]) -> dict[str, Any]:
    rows = []
    for number, each in enumerate(scores):
        documents = [f"{number}/{n}" for n in range(len(each["mapped"]))]
        rows.append({"name": f"task{number}", **summarise_scores(each, np.zeros(len(documents)), documents)})
    pooled = rows[0]
    if len(rows) > 1:
        whole = {name: np.concatenate([each[name] for each in scores]) for name in scores[0]}
        count = len(whole["mapped"])
        pooled = summarise_scores(whole, np.zeros(count), [str(n) for n in range(count)])
    pooled = {"benchmarks": [row["name"] for row in rows], **copy.deepcopy(pooled)}
    for row, p in zip(rows, holm([r["tests"]["mapped_vs_source"]["accuracy_p"] for r in rows]), strict=True):
        row["tests"]["mapped_vs_source"]["accuracy_p_holm"] = p
    return {"benchmarks": rows, "pooled": pooled}


def told(*scores: dict[str, np.ndarray]) -> Verdict:
    return REPORTS["lm_eval"].verdict(data_of(*scores))


def test_the_verdict_says_what_the_tests_do():
    drawn = random_scores(2)
    better = {name: drawn[name] for name in ("ceiling", "source", "mapped")}
    worse = better | {"mapped": drawn["floor"], "source": drawn["mapped"], "ceiling": np.ones(200)}
    same = better | {"mapped": better["source"]}
    assert told(worse).kind == "worse"
    assert told(same).kind == "none"
    assert told(better, same).kind == "beats"
    mixed = told(better, worse, same)
    assert mixed.kind == "mixed"
    assert "better on task0, worse on task1, no difference shown on task2" in mixed.sentence
    alone = told(better)
    assert alone.kind == "beats"
    assert "on task0, with " in alone.sentence
    assert "exact McNemar p < 0.001" in alone.sentence


def test_the_verdict_says_what_is_not_in_its_number():
    data = data_of(random_scores(2), random_scores(3))
    data["pooled"] = {**data["benchmarks"][0], "benchmarks": ["task0"]}
    sentence = REPORTS["lm_eval"].verdict(data).sentence
    assert " on task0, with " in sentence
    assert ", without task1, whose answers are not simply right or wrong; by benchmark" in sentence


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("eval.tasks=[]", r"eval\.tasks is empty"),
        ("eval.tasks=[toy_choices,toy_choices]", r"eval\.tasks: toy_choices is named twice"),
        ("eval.limit=0", r"eval\.limit=0 must be 1 or more"),
        ("eval.num_fewshot=-1", r"eval\.num_fewshot=-1"),
        ("eval.batch_size=0", r"eval\.batch_size=0"),
        ("eval.include_path=nowhere", r"eval\.include_path: no folder 'nowhere'"),
    ],
)
def test_bad_settings_are_refused(tmp_path, setting, said):
    with pytest.raises(KvxferError, match=said):
        settings_of("evaluate", tmp_path, "eval=lm_eval", setting)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["own_texts"], r"own_texts scores whole texts.*use eval=perplexity"),
        (["own_download"], r"eval\.tasks: own_download can't be loaded .*HF_HUB_OFFLINE is set: unset it"),
        (["own_group", "own_one"], r"own_one is asked twice"),
        (["no_such_task"], r"no_such_task: no such task in lm-evaluation-harness"),
    ],
)
def test_tasks_that_can_not_be_asked_are_refused(own_tasks, monkeypatch, names, said):
    import lm_eval.tasks

    real = lm_eval.tasks.TaskManager  # reading the thousands of tasks that come with it takes a while
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **given: real(**given | {"include_defaults": False}))
    with pytest.raises(KvxferError, match=said):
        harness_tasks.load_tasks(names, [own_tasks], None, 0)


def test_few_shot_settings_follow_the_harness(own_tasks):
    tasks = harness_tasks.load_tasks(["own_group"], [own_tasks], 3, 0)
    assert [task.get_config("num_fewshot") for task in tasks.single.values()] == [3, 3]
    # Examples come from the asked questions: of six, the asked one is none.
    with pytest.raises(KvxferError, match=r"eval\.num_fewshot=6: own_one has 5 examples"):
        harness_tasks.load_tasks(["own_one"], [own_tasks], 6, 0)
    one = harness_tasks.load_tasks(["own_one"], [own_tasks], 5, 0).single["own_one"]
    one.set_fewshot_seed(seed=0)
    prompt = one.fewshot_context(next(iter(one.eval_docs)), num_fewshot=5)
    assert prompt.count("where ben") == 6
