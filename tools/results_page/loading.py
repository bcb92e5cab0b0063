"""Committed results read from their files, those of one pair together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.evals.specs import QuestionsSpec
from tools.collect import SCHEMA
from tools.results_page.data import Baseline, Json, MapResult, PairResults, Scores, commonest

AGREE = 0.01
"""Nats per token by which a baseline's conditions may differ in two files: other hardware rounds products otherwise."""

_AGAIN = "evaluate the maps of one pair with the same models, and collect them again"


def load_results(folder: Path) -> dict[str, PairResults]:
    """Every pair of the committed JSON files of a folder.

    Raises:
        KvxferError: there is none, one is not what ``tools.collect`` writes, or two do not agree on a baseline.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise KvxferError(f"no JSON in {folder}: write some with python -m tools.collect outputs {folder}/<pair>.json")
    found: dict[tuple[str, str, str], tuple[dict[str, Baseline], dict[str, MapResult]]] = {}
    for file in files:
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise KvxferError(f"{file}: schema {data['schema']} is not {SCHEMA}: collect it again")
            # Trained maps are compared with the closed forms of their own file, which the pair's tables leave alone.
            kind = "/trained" if any("trainer" in one for one in data["maps"]) else ""
            for key, value in data["baselines"].items():
                baselines, maps = found.setdefault((data["pair"]["name"], _asked(value), kind), ({}, {}))
                read = _baseline(key, value)
                _check_agreement(baselines.setdefault(key, read), read, file)
                own = (one for one in data["maps"] if one["runs"]["baseline"] == key)
                maps |= {one["runs"]["evaluate"]: MapResult(one, Scores.read(one["scores"])) for one in own}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KvxferError(f"{file} is no collected result ({error}): write it with tools.collect") from error
    named = {}
    for pair, asked, kind in sorted(found):
        # What most of a pair's maps were asked goes without saying.
        _, usual = max((len(found[key][1]), key[1]) for key in found if (key[0], key[2]) == (pair, kind))
        name = (pair if asked == usual else f"{pair}/{asked}") + kind
        named[name] = _pair(name, *found[pair, asked, kind])
    for name, trained in named.items():
        closed = named.get(name.removesuffix("/trained"))
        if closed is not None and closed is not trained and closed.baseline.id == trained.baseline.id:
            named[closed.name] = replace(closed, beside=trained.trained)
    return dict(sorted(named.items()))


def _check_agreement(first: Baseline, other: Baseline, file: Path) -> None:
    """Maps of two files are compared item by item, so baselines of one id must be of the same questions and models."""
    same_items = first.documents == other.documents and np.array_equal(first.tokens, other.tokens)
    if not same_items or first.conditions.keys() != other.conditions.keys():
        raise KvxferError(f"{file}: baseline {other.id} has other items than in the file before: {_AGAIN}")
    for name, scores in first.conditions.items():
        gap = abs(first.per_token(scores) - other.per_token(other.conditions[name]))
        if not gap <= AGREE:
            raise KvxferError(
                f"{file}: {name} of baseline {other.id} differs by {gap:.3g} nats per token from the file before, more "
                f"than rounding does ({AGREE}): {_AGAIN}"
            )


def _asked(baseline: Json) -> str:
    """The text of an evaluation, or ``questions`` if it was only which text follows."""
    config = baseline["config"]
    only = config["eval"].get("choices") and not config["eval"].get("score_rest")
    return "questions" if only else str(config.get("corpus", {}).get("name"))


_OPTIONS: dict[str, dict[str, Any]] = {
    "mapped": {},
    "mapped_choices": {"choices": 4, "questions": 1, "score_rest": True},
    "choices": {"choices": 4},
}
"""What options of ``eval`` set, where it is not what goes without saying."""

_SAID = ("stories", "questions", "length", "prefix", "choices", "answer", "seed")


def _option(asked: Json) -> str:
    """The overrides of ``eval`` that ask for the items of a baseline."""
    name = "mapped" if not asked.get("choices") else "mapped_choices" if asked.get("score_rest") else "choices"
    usual = {**vars(QuestionsSpec()), **_OPTIONS[name]}
    given = {key: asked[key] for key in _SAID if asked.get(key) is not None}
    changed = [f"eval.{key}={json.dumps(value)}" for key, value in given.items() if value != usual[key]]
    return " ".join([f"eval={name}", *changed])


def _baseline(identifier: str, data: Json) -> Baseline:
    conditions = {name: Scores.read(scores) for name, scores in data["conditions"].items()}
    tokens = np.array(data["items"]["tokens"], dtype=np.float64)
    asked = _option(data["config"]["eval"])
    return Baseline(identifier, list(data["items"]["document"]), tokens, conditions, asked)


def _pair(name: str, baselines: Mapping[str, Baseline], maps: Mapping[str, MapResult]) -> PairResults:
    usual = commonest(one.data["runs"]["baseline"] for one in maps.values())
    if usual not in baselines:
        raise KvxferError(f"results of {name}: no map, or its baselines {usual} are missing; collect it again")
    alike = [maps[key] for key in sorted(maps) if maps[key].data["runs"]["baseline"] == usual]
    closed, trained = ([one for one in alike if one.trained == which] for which in (False, True))
    return PairResults(name, baselines[usual], closed, trained)
