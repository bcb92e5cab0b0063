"""The two measures of written answers, by hand, and the harness's CoQA on them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvxfer.evals.benchmarks.squad import compute_exact, compute_f1, offered
from kvxfer.evals.benchmarks.tasks import load_tasks

ASKED = {"input_text": ["Who is Tom?", "Where did he live?"], "turn_id": [1, 2]}
ANSWERED = {"input_text": ["a cat", "in a barn"], "turn_id": [1, 2]}
OTHERS = {"0": {"input_text": ["a cat", "a red barn"], "turn_id": [1, 2]}}


@pytest.mark.parametrize(
    ("expected", "answer", "exact", "f1"),
    [
        ("the red barn", "Red barn.", 1, 1.0),
        ("in a red barn", "a red house", 0, 0.4),  # one word of three and of two
        ("cat cat dog", "cat", 0, 0.5),
        ("barn", "house", 0, 0.0),
        ("the", "", 1, 1.0),
        ("barn", "the", 0, 0.0),
    ],
)
def test_answers_are_compared_as_words(expected, answer, exact, f1):
    assert compute_exact(expected, answer) == exact
    assert compute_f1(expected, answer) == pytest.approx(f1)


def _module_is_there() -> bool:
    try:
        return importlib.util.find_spec("transformers.data.metrics.squad_metrics") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(_module_is_there(), reason="this transformers still has the module, which is left alone")
def test_nothing_is_left_behind_where_the_module_is_gone():
    before = {name for name in sys.modules if name.startswith("transformers.data")}
    with offered():
        import transformers.data.metrics.squad_metrics as found
    assert found.compute_f1("a barn", "barn") == 1
    assert {name for name in sys.modules if name.startswith("transformers.data.metrics")} <= before


def test_a_package_that_is_left_of_it_comes_back(monkeypatch):
    """Where the package of the module is still there without it."""
    package = ModuleType("transformers.data.metrics")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.delitem(sys.modules, f"{package.__name__}.squad_metrics", raising=False)
    with offered():
        from transformers.data.metrics.squad_metrics import compute_exact as found
    assert found("a barn", "barn") == 1
    assert sys.modules[package.__name__] is package
    assert f"{package.__name__}.squad_metrics" not in sys.modules


def test_coqa_of_the_harness_loads_and_scores(tmp_path: Path):
    lm_eval = pytest.importorskip("lm_eval")
    data = tmp_path / "data.jsonl"
    document = {"id": "1", "story": "Tom is a cat.", "questions": ASKED, "answers": ANSWERED}
    data.write_text(json.dumps({**document, "additional_answers": OTHERS}))
    local = {"data_files": {"validation": str(data)}, "cache_dir": str(tmp_path / "cache")}
    task = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / "coqa" / "default.yaml"),
        "task": "coqa_here",
        "dataset_path": "json",
        "dataset_kwargs": local,
        "training_split": None,
    }
    (tmp_path / "coqa.yaml").write_text(json.dumps(task))
    loaded = load_tasks(["coqa_here"], [tmp_path], None, 0).single["coqa_here"]
    [document] = list(loaded.eval_docs)
    assert loaded.doc_to_text(document).endswith("Q: Where did he live?\n\nA:")
    assert loaded.get_config("generation_kwargs")["until"] == ["\nQ:"]
    # Every one of the two expected answers is once left out, and the answer compared with the other.
    assert loaded.process_results(document, [" a barn\nQ: Who"]) == {"em": 0.0, "f1": pytest.approx(2 / 3)}
    assert loaded.process_results(document, ["red barn"]) == {"em": 0.5, "f1": pytest.approx(0.75)}
