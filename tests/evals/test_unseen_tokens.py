"""First tokens that a map has never seen are never mapped by any kind of evaluation: such a plan is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import KvxferError
from kvxfer.evals.kinds import KINDS
from kvxfer.experiment.stages.evaluate import evaluate
from kvxfer.files import read_json
from kvxfer.maps.artifact import MANIFEST
from tests.small_runs import TOY_EVAL, run, settings_of, toy_models

REFUSED = (
    r"plan\.exact_first={} \(plan=\w+\) maps first tokens .*corpus\.skip_first=3; set plan\.exact_first=3 or more, or "
    r"calibrate and train .*corpus\.skip_first={}"
)


def never(*_: Any) -> None:
    raise AssertionError("weights were loaded")


@pytest.mark.parametrize("option", [*{**KINDS, "items": None, "full": None}, "standard", "choices"])
def test_every_kind_refuses_before_anything_is_made(option: str, tmp_path: Path) -> None:
    name = "standard" if option == "items" else option
    corpus = ["corpus=pydoc"] if option == "choices" else []
    given = [*corpus, f"eval={name}", "corpus.skip_first=3"]
    with pytest.raises(KvxferError, match=REFUSED.format(0, 0)) as refusal:
        settings_of("evaluate", tmp_path, *given, "plan=all")
    assert "\n" not in str(refusal.value)
    with pytest.raises(KvxferError, match=REFUSED.format(2, 2)):
        settings_of("evaluate", tmp_path, *given, "plan.exact_first=2")
    settings_of("evaluate", tmp_path, *given, "plan.exact_first=3")


def test_random_weights_have_seen_no_token_and_are_timed_under_any_plan(tmp_path: Path) -> None:
    settings_of("evaluate", tmp_path, "pair=geometry", "eval=latency", "plan=all", "corpus.skip_first=3")


def test_a_map_that_is_named_says_itself_what_it_has_seen(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Whatever the run's own text leaves out, in one direction and the other."""
    models = toy_models(tiny_folders)
    seen, unseen, other = (
        run("train", tmp_path, *models, *more)
        for more in ([], ["corpus.skip_first=3"], ["corpus.skip_first=3", "pair.reverse=true"])
    )
    assert read_json(unseen / MANIFEST)["calibrated_on"]["skip_first"] == 3
    for option in ("mapped", "full"):
        settings = settings_of("evaluate", tmp_path, *models, f"eval={option}", f"map={unseen}", "plan=all")
        with pytest.raises(KvxferError, match=REFUSED.format(0, 0)):
            evaluate(settings, load=never)  # type: ignore[arg-type]
    talks = ["eval=multiturn", "plan=all", f"map={seen}", f"eval.reverse_map={other}"]
    with pytest.raises(KvxferError, match=REFUSED.format(0, 0)):
        evaluate(settings_of("evaluate", tmp_path, *models, *talks), load=never)  # type: ignore[arg-type]
    asked = ["eval=mapped", *TOY_EVAL, "plan=all", f"map={seen}", "corpus.skip_first=3"]
    assert run("evaluate", tmp_path, *models, *asked)
