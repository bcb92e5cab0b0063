"""eval=lm_eval with tasks of every kind: log-likelihoods end to end; what can't be asked is told before the work."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.benchmarks import benchmarks
from kvxfer.evals.benchmarks import tasks as harness_tasks
from kvxfer.evals.benchmarks.benchmarks import Benchmarks
from kvxfer.evals.benchmarks.tasks import write_toy_tasks
from kvxfer.evals.evaluation import Subject
from kvxfer.experiment.identity import identity
from kvxfer.maps.apply import Mapper
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from kvxfer.text.spec import CorpusSpec
from kvxfer.toy.tokenizer import build_tokenizer
from tests.exact_maps import exact_map, with_itself
from tests.harness_pairs import own_model

ASKED = [f"anna kitchen . ben {place} . where ben" for place in ("garden", "attic", "cellar")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks that differ in how they answer and what they measure."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"asked": asked, "said": "hot tea"}) + "\n" for asked in ASKED)
    )
    (folder / "broken.jsonl").write_text('{"asked": ')

    def task(name: str, data: str = "data.jsonl", **options: Any) -> None:
        local = {"data_files": {"test": str(folder / data)}, "cache_dir": str(folder / "cache")}
        common = {"dataset_path": "json", "dataset_kwargs": local, "test_split": "test", "doc_to_text": "{{asked}}"}
        whole = {"task": name, **common, "doc_to_target": " {{said}}", **options}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))

    def written(measure: str, aggregation: str, most: int) -> dict[str, Any]:
        return {
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["."], "max_gen_toks": most},
            "metric_list": [{"metric": measure, "aggregation": aggregation, "higher_is_better": True}],
        }

    likelihoods = [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ]
    task("continuation", output_type="loglikelihood", metric_list=likelihoods)
    task("surprise", output_type="loglikelihood", metric_list=likelihoods[:1])
    task("translated", **written("bleu", "bleu", 3))
    task("long", **written("exact_match", "mean", 100_000))
    choices = {"output_type": "multiple_choice", "doc_to_choice": ["hot tea", "milk"]}
    task("rightful", **choices, doc_to_target="{{said}}", metric_list=likelihoods[1:])
    task("numbered", **choices, doc_to_target=1, metric_list=likelihoods[1:])
    task("spaced", **choices, metric_list=likelihoods[1:])  # ' hot tea' is not 'hot tea'
    later = "{{ 0 if 'garden' in asked else 5 }}"  # the harness itself looks at the first sample alone
    task("later", **choices, doc_to_target=later, metric_list=likelihoods[1:])
    task("negative", **choices, doc_to_target=-1, metric_list=likelihoods[1:])
    task("several", **choices, doc_to_target=[0, 7], metric_list=likelihoods[1:])
    task("nonsense", **written("nonsense", "mean", 3))
    task("broken", data="broken.jsonl", **written("exact_match", "mean", 3))
    task("missing", data="nowhere.jsonl", **written("exact_match", "mean", 3))
    return folder


@pytest.fixture(scope="module")
def subject(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    pair, nowhere = with_itself(tiny_pair), tmp_path_factory.mktemp("nowhere")
    cache_map = exact_map(pair)
    return Subject(pair, cache_map, Mapper(cache_map), nowhere, Plan("sinks", 2), CorpusSpec("toy", "toy", 48), ())


def test_log_likelihoods_of_one_continuation_are_scored_as_the_harness_does(folder, subject, tiny_pair):
    spec = Benchmarks("lm_eval", tasks=("continuation",), include_path=str(folder))
    [found] = spec.measure(subject)["benchmarks"]
    assert (found["kind"], found["measure"], found["chance"], found["n"]) == ("loglikelihood", "acc", 0.0, len(ASKED))
    theirs = harness_tasks.run_tasks(
        harness_tasks.load_tasks(["continuation"], [folder], None, 0), own_model(tiny_pair), None, 0
    )["samples"]["continuation"]
    for sample, other in zip(found["samples"], theirs, strict=True):
        for condition in ("ceiling", "source", "mapped"):
            [[nats, greedy]] = sample["answers"][condition]
            assert nats == pytest.approx(other["filtered_resps"][0][0], abs=1e-4)
            assert greedy == other["filtered_resps"][0][1] == bool(sample["scores"]["acc"][condition])
    ids = torch.tensor([tiny_pair.tokenizer.encode(f"{ASKED[0]} hot tea")])
    logs = tiny_pair.target.logits(ids).log_softmax(-1)
    plain = sum(float(logs[0, at - 1, ids[0, at]]) for at in (-2, -1))
    assert found["samples"][0]["answers"]["ceiling"][0][0] == pytest.approx(plain, abs=1e-4)
    assert found["samples"][0]["answers"]["floor"][0][0] != pytest.approx(plain, abs=1e-2)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("continuation", "translated"), r"eval\.tasks: translated has no measure per sample .*\(bleu\)"),
        (("continuation", "surprise"), r"eval\.tasks: surprise has no measure per sample .*\(perplexity\)"),
        (("continuation", "long"), r"answers of 100000 tokens \(max_gen_toks\)"),
    ],
)
def test_what_can_not_be_compared_is_told_before_anything_else_is_asked(folder, subject, monkeypatch, names, said):
    limits = []
    real = benchmarks.run_tasks

    def run_tasks(tasks, model, limit, seed):
        limits.append(limit)
        return real(tasks, model, limit, seed)

    monkeypatch.setattr(benchmarks, "run_tasks", run_tasks)
    with pytest.raises(KvxferError, match=said):
        Benchmarks("lm_eval", tasks=names, include_path=str(folder)).measure(subject)
    assert limits == [1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("spaced", r"right answer of sample 0 of spaced is ' hot tea', none of its 2 choices"),
        ("later", r"right answer of sample 1 of later is 5, none of its 2 choices"),
        ("negative", r"right answer of sample 0 of negative is -1, none of its 2"),
        ("several", r"right answer of sample 0 of several is 7, none of its 2"),
        ("nonsense", r"nonsense is scored by nonsense, a metric that lm-evaluation-harness .* does not know"),
    ],
)
def test_a_task_that_nothing_can_answer_rightly_is_refused_before_there_is_a_map(folder, subject, name, said):
    asked = Benchmarks("lm_eval", tasks=("rightful", "numbered", "continuation", name), include_path=str(folder))
    with pytest.raises(KvxferError, match=said):
        asked.check(subject.pair, subject.corpus, subject.plan)
    with pytest.raises(KvxferError, match=said):
        asked.measure(subject)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", r"broken can't be loaded \(.*\); its file or its data is faulty"),
        ("missing", r"missing can't be loaded \(.*\); HF_HUB_OFFLINE is set"),
    ],
)
def test_the_advice_is_about_what_went_wrong(folder, name, said):
    with pytest.raises(KvxferError, match=said):
        harness_tasks.load_tasks([name], [folder], None, 0)


def test_without_the_harness_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KvxferError, match=r'pip install "kvxfer\[eval\]"'):
        identity(Benchmarks("lm_eval"))


def test_toy_words_that_a_tokenizer_cuts_are_refused(tmp_path):
    letters = SimpleNamespace(encode=lambda text, **_: list(text), decode="".join)
    with pytest.raises(KvxferError, match=r"words the pair's tokenizer does not know"):
        write_toy_tasks(tmp_path, letters, 48)
    with pytest.raises(KvxferError, match=r"corpus\.length=5"):
        write_toy_tasks(tmp_path, build_tokenizer(), 5)


def test_what_the_harness_warns_of_is_part_of_what_is_measured(folder, subject, tmp_path, capfd):
    """It names what it chose where a task leaves it open: here what counts as better."""
    task = json.loads((folder / "continuation.yaml").read_text())
    (tmp_path / "open.yaml").write_text(json.dumps({**task, "task": "open", "metric_list": [{"metric": "acc"}]}))
    found = Benchmarks("lm_eval", tasks=("open",), include_path=str(tmp_path), limit=1).measure(subject)
    assert found["library_warnings"] == [
        "[Task: open] metric acc is defined, but aggregation is not. using default aggregation=mean",
        "[Task: open] metric acc is defined, but higher_is_better is not. using default higher_is_better=True",
    ]
    assert "higher_is_better" not in "".join(capfd.readouterr())
