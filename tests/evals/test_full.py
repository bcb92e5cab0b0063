"""All evaluations in one report: parts are runs of their own, and what fails is told without losing the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvxfer.experiment.stages.evaluate as stage
from kvxfer.errors import KvxferError, NotApplicable
from kvxfer.evals.perplexity import Perplexity
from kvxfer.evals.questions import Questions
from kvxfer.evals.specs import FullSpec
from kvxfer.experiment.identity import identity
from kvxfer.experiment.sweeps.measures import numbers
from kvxfer.models.pair import load_pair
from kvxfer.report.evaluated import find
from kvxfer.report.full import decisive, missing, overall, render, without_items
from kvxfer.report.schema import validate
from kvxfer.report.verdict import WORDS
from tests.report.test_html import stands_alone
from tests.small_runs import results_of, settings_of, toy_models

pytestmark = pytest.mark.draws

PARTS = "eval.parts=[standard,choices,perplexity]"
ITEMS = Questions("standard", stories=4, questions=3, batch_size=6, generate=False)
TEXT = Perplexity("perplexity", prefixes=(24, 48), scored=8, rows=4)


def small(outputs: Path, folders: tuple[Path, Path], **changed: Any) -> Any:
    """Settings of a full evaluation whose parts take a moment; ``changed`` are fields of the perplexity part's."""
    settings = settings_of("evaluate", outputs, *toy_models(folders), "eval=full", PARTS)
    parts = dict(settings.parts)
    parts["standard"] = replace(parts["standard"], eval=ITEMS)
    parts["perplexity"] = replace(parts["perplexity"], eval=replace(TEXT, **changed))
    return replace(settings, parts=parts)


class Loads:
    """Counts how often a pair is loaded."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, spec: Any) -> Any:
        self.count += 1
        return load_pair(spec)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def loads() -> Loads:
    return Loads()


@pytest.fixture(scope="module")
def done(outputs: Path, tiny_folders: tuple[Path, Path], loads: Loads) -> Path:
    return stage.evaluate(small(outputs, tiny_folders), show=False, load=loads)[-1].parent


def test_every_part_is_a_run_of_its_own_and_the_pair_is_loaded_once(done, outputs, loads):
    results = results_of(done)
    parts = results["data"]["parts"]
    assert [(part["name"], part["status"]) for part in parts] == [
        ("standard", "measured"),
        ("choices", "skipped"),
        ("perplexity", "measured"),
    ]
    assert "asks which text follows" in parts[1]["reason"]
    for part in (parts[0], parts[2]):
        own = results_of(outputs / "evaluate" / part["run_id"])
        assert part["results"] == without_items(own)
        assert results["provenance"]["inputs"][part["name"]] == part["run_id"]
    assert loads.count == 1


def test_nothing_is_measured_twice(done, outputs, tiny_folders, monkeypatch):
    monkeypatch.setattr(Perplexity, "measure", None)
    monkeypatch.setattr(Questions, "measure", None)
    refuse = Loads()
    assert stage.evaluate(small(outputs, tiny_folders), show=False, load=refuse)[-1].parent == done
    assert refuse.count == 0


def test_the_results_are_complete_and_the_report_is_made_from_them(done):
    results = results_of(done)
    validate(results)
    report = (done / "report.md").read_text()
    assert report == render(results)
    said = results["verdict"]
    assert said["word"] == WORDS[said["kind"]]
    title, _, verdict, *_ = report.splitlines()
    assert title.startswith("# ")
    assert verdict == f"**{said['sentence']}**"
    first = next(part for part in results["data"]["parts"] if part["name"] == said["decided_by"])
    assert said["sentence"].startswith(said["word"])
    assert said["sentence"].endswith(first["verdict"]["sentence"])
    for words in (
        "## At a glance",
        "## Retention by task",
        "## Perplexity after a prefix (perplexity)",
        "### Headline",
        "`choices` (skipped): eval.choices=4 asks",
        "## Glossary",
    ):
        assert words in report


def test_side_by_side_a_full_report_stands_for_its_parts(done):
    assert [run.kind for run in find([str(done)], done)] == ["items", "perplexity"]


def test_of_a_sweep_what_decides_stands_for_the_whole(done):
    first = results_of(done)["data"]["parts"][0]["results"]
    assert numbers("evaluate", done)["accuracy"] == first["data"]["conditions"]["mapped"]["accuracy"]


def test_the_page_has_every_figure(done):
    tags = stands_alone((done / "report.html").read_text())
    figures = sorted(path.relative_to(done).as_posix() for path in done.rglob("*.png"))
    assert "figures/retention.png" in figures
    assert "figures/standard/conditions.png" in figures
    assert len({image["src"] for image in tags.named("img")}) == len(figures)
    assert "<em>" not in (done / "report.html").read_text()


def test_a_part_that_was_measured_again_makes_another_report(done, outputs, tiny_folders):
    settings = small(outputs, tiny_folders)
    again = replace(settings, parts={**settings.parts, "perplexity": replace(settings.parts["perplexity"], force=True)})
    assert stage.evaluate(again, show=False)[-1].parent != done


def test_a_part_that_fails_leaves_its_reason_and_the_others(outputs, tiny_folders):
    settings = small(outputs, tiny_folders, prefixes=(10**4,))
    with pytest.raises(KvxferError, match=r"1 of 3 parts failed \(perplexity: .*10008 tokens.*\); see .*report\.html"):
        stage.evaluate(settings, show=False)
    folder = max((outputs / "evaluate").glob("[!.]*/report.html"), key=lambda path: path.stat().st_mtime).parent
    results = results_of(folder)
    validate(results)
    assert [part["status"] for part in results["data"]["parts"]] == ["measured", "skipped", "failed"]
    assert "`perplexity` (failed): " in (folder / "report.md").read_text()


def test_an_unforeseen_error_of_a_part_is_kept_too(outputs, tiny_folders, monkeypatch, done):
    def broken(self: Perplexity, subject: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Perplexity, "measure", broken)
    with pytest.raises(KvxferError, match="perplexity: RuntimeError: out of memory"):
        stage.evaluate(small(outputs, tiny_folders, rows=3), show=False)


def test_where_nothing_is_measured_there_is_no_report(tiny_folders, outputs):
    settings = small(outputs, tiny_folders)
    with pytest.raises(KvxferError, match=r"eval\.parts: none could be measured \(choices: not here\)"):
        stage.evaluate(replace(settings, parts={"choices": NotApplicable("not here")}), show=False)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("[]", r"eval\.parts=\[\] names nothing"),
        ("[standard,standard]", r"eval\.parts names standard twice"),
        ("[nowhere]", r"eval\.parts: 'nowhere' is no option of eval that can be a part; there are choices, "),
        ("[full]", r"eval\.parts: 'full' is no option"),
    ],
)
def test_wrong_parts_are_refused(parts, message, tmp_path):
    with pytest.raises(KvxferError, match=message):
        settings_of("evaluate", tmp_path, "eval=full", f"eval.parts={parts}")


def part(name: str, verdict: str, kind: str = "perplexity") -> dict[str, Any]:
    said = {"kind": verdict, "head": f"{name} {verdict}", "sentence": f"{name} {verdict}: p = 0.01."}
    results = {"data": {"ancestry": None, "tests": {}}}
    return {"name": name, "status": "measured", "kind": kind, "verdict": said, "results": results}


def test_the_items_decide_and_what_contradicts_them_is_named():
    parts = [part("a", "worse"), part("b", "beats", "items"), part("c", "none"), part("d", "beats")]
    found = overall(parts)
    assert (found["word"], found["decided_by"]) == ("Worth it", "b")
    assert found["sentence"] == "Worth it. b beats: p = 0.01."
    assert (found["against"], found["in_favour"]) == (["a", "c"], [])
    found = overall([part("b", "worse", "items"), part("c", "none")])
    assert (found["word"], found["against"], found["in_favour"]) == ("Harmful", [], ["c"])
    assert overall([part("c", "none"), part("d", "beats")])["word"] == "No benefit"
    worded = part("e", "beats")
    worded["verdict"]["sentence"] = "Worth it: e beats, p = 0.01."
    assert overall([worded])["sentence"] == "Worth it: e beats, p = 0.01."


def test_what_is_timed_never_decides():
    found = overall([part("t", "worse", "latency"), part("c", "beats")])
    assert (found["word"], found["decided_by"], found["against"]) == ("Worth it", "c", ["t"])
    found = overall([part("t", "beats", "latency")])
    assert (found["kind"], found["word"], found["decided_by"], found["in_favour"]) == (
        "none",
        "Not compared",
        None,
        ["t"],
    )
    assert found["sentence"] == "Not compared: nothing was set against the source, only times were measured (t)."
    assert decisive([missing("a", "failed", "x"), part("t", "beats", "latency")], found)["name"] == "t"


def test_a_pair_that_can_show_nothing_decides_nothing():
    found = overall([part("b", "unable", "items"), part("c", "beats"), part("d", "none"), part("e", "worse")])
    assert (found["kind"], found["word"], found["decided_by"]) == ("unable", "Cannot tell", "b")
    assert found["sentence"] == "Cannot tell. b unable: p = 0.01."
    assert (found["against"], found["in_favour"]) == (["e"], ["c"])
    assert overall([part("b", "beats", "items"), part("c", "unable")])["against"] == ["c"]


@pytest.mark.parametrize(
    "key", ["verdict.word", "data.parts", "provenance", "data.parts.0.tasks", "data.parts.1.reason"]
)
def test_a_missing_key_is_named(done, key):
    results = json.loads((done / "results.json").read_text())
    *parents, last = key.split(".")
    holder: Any = results
    for name in parents:
        holder = holder[int(name) if isinstance(holder, list) else name]
    del holder[last]
    with pytest.raises(KvxferError, match=f"key {key} is missing"):
        validate(results)


def test_a_spec_knows_its_parts_alone():
    assert identity(FullSpec("full", ("standard",))) == {"parts": ["standard"]}
