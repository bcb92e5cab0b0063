"""A transfer of nothing is never worth it: in no kind of evaluation, however good nothing is.

Real results of every kind, on a pair whose source was cut out of its target, so that all controls are there. Their
items are asked a dozen times over, since a few can show nothing; what they scored is replaced, and the evaluation's own
functions sum them up again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_corpora import write
from small_runs import TEXT_ROWS, little, results_of, run, toy_models

from kvxfer.evals.benchmarks import tasks as harness_tasks
from kvxfer.evals.benchmarks.scores import _summary
from kvxfer.evals.diagnostics import Predictions, _tests
from kvxfer.evals.generation import CONDITIONS, Decoded, Decoder, summarise_decoding
from kvxfer.evals.items import toy_items
from kvxfer.evals.multiturn import Handed, summarise_pattern
from kvxfer.evals.perplexity import compared
from kvxfer.evals.specs import LARGE, TOY_TASKS
from kvxfer.evals.statistics import NOTHING_HANDED, holm, summarise
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.blocks import DESIGNS
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import load_pair
from kvxfer.models.spec import ModelSpec, PairSpec
from kvxfer.report.kinds import REPORTS
from kvxfer.toy.world import VOCABULARY
from tests.random_maps import random_map

Json = dict[str, Any]
Score = Callable[[str, int], tuple[float, bool]]
"""Nats per token, and right or wrong, of a condition's n-th item."""

TIMES = 12
LEVELS = {"ceiling": 1.0, "source": 2.0, "mapped": 1.2, "no_context": 3.0, "floor": 3.4, "raw_copy": 3.3}
LEVELS |= {"ancestor_copy": 3.2, "identity": 1.0}
REAL = None
OPTIONS = {
    **{"items": "standard", "text": "standard", "perplexity": "perplexity", "multiturn": "multiturn"},
    **{"lm_eval": "lm_eval", "diagnostics": "diagnostics"},
}
"""The kinds whose results hold what their items scored; of generation, which does not, see below."""


def scored(levels: dict[str, float], takes: str | None = None) -> Score:
    """Items that are as hard for one condition as for another; the mapped cache scores as another, if told so."""
    draw = np.random.default_rng(3)
    hard, luck = draw.normal(0, 0.2, 4000), draw.random(4000)
    own = {name: draw.normal(0, 0.05, 4000) for name in levels}

    def score(name: str, n: int) -> tuple[float, bool]:
        name = takes if name == "mapped" and takes is not None else name
        level = levels.get(name, 4.0)
        noise = own[name][n] if name in own else 0.0
        return level + hard[n] + noise, bool(luck[n] < 1.1 - 0.3 * level)

    return score


def repeated(records: Sequence[Json]) -> list[Json]:
    """The items about a dozen times as many documents."""
    return [{**each, "document": f"{each['document']} {turn}"} for turn in range(TIMES) for each in records]


def rescored(
    records: Sequence[Json], score: Score | None, takes: str, names: dict[str, str] | None = None
) -> list[Json]:
    """Items with other scores, or with the mapped cache's own made those of a control; ``names`` as they call them."""
    known = names or {}
    found = []
    for n, record in enumerate(repeated(records)):
        nats, right = dict(record["nats"]), dict(record.get("correct") or {})
        if score is REAL:
            for each in (nats, right):
                if each:
                    each[known.get("mapped", "mapped")] = each[known.get(takes, takes)]
        else:
            back = {called: name for name, called in known.items()}
            for called in nats:
                value, correct = score(back.get(called, called), n)
                nats[called] = record["tokens"] * value
                if right:
                    right[called] = correct
        found.append({**record, "nats": nats} | ({"correct": right} if right else {}))
    return found


def of_items(data: Json, score: Score | None, takes: str) -> Json:
    records = rescored(data["items"], score, takes)
    return data | {"items": records, **summarise(records)}


def of_perplexity(data: Json, score: Score | None, takes: str) -> Json:
    points = []
    for point in data["points"]:
        records = rescored(point["items"], score, takes)
        points.append(point | {"items": records, **summarise(records)})
    return data | {"points": points, "domains": [data["domains"][0] | compared(points, data["calibrated_length"])]}


def of_multiturn(data: Json, score: Score | None, takes: str) -> Json:
    names = {"mapped": "up", "ceiling": "large", "source": "small"} | {n: f"{LARGE} {n}" for n in NOTHING_HANDED}
    records = rescored(data["items"], score, takes, names)
    handed = [Handed(LARGE, 1, 8, 9) for _ in range(data["turns"])]
    return data | {"items": records, "patterns": {"up": summarise_pattern(records, "up", handed)}}


def of_benchmarks(data: Json, score: Score | None, takes: str) -> Json:
    found = []
    for each in data["benchmarks"]:
        samples = repeated(each["samples"])
        for n, sample in enumerate(samples):
            own = sample["scores"][sample["measure"]]
            own = own | {"mapped": own[takes]} if score is REAL else {name: float(score(name, n)[1]) for name in own}
            samples[n] = sample | {"scores": {sample["measure"]: own}}
        found.append(each | {"samples": samples} | _summary(samples))
    tests = [each["tests"]["mapped_vs_source"] for each in found]
    for test, p in zip(tests, holm([test["accuracy_p"] for test in tests]), strict=True):
        test["accuracy_p_holm"] = p
    whole = [sample for each in found for sample in each["samples"]]
    return data | {"benchmarks": found, "pooled": data["pooled"] | _summary(whole)}


def of_diagnostics(data: Json, score: Score | None, takes: str) -> Json:
    own = data["domains"][0]
    items = repeated(own["items"])
    predictions = {name: Predictions() for name in own["predictions"]}
    for n, item in enumerate(items):
        for name, found in predictions.items():
            # From the ceiling, which has none.
            kl = item["kl"][takes if name == "mapped" else name] if score is REAL else score(name, n)[0] - 1.0
            found.kl.append(kl)
            found.agreed.append(1)
            found.tokens.append(1)
    documents = [item["document"] for item in items]
    said = {name: each.summary(documents) for name, each in predictions.items()}
    return data | {"domains": [own | {"predictions": said, "tests": _tests(predictions, documents)}]}


AGAIN: dict[str, Callable[[Json, Score | None, str], Json]] = {
    "items": of_items,
    "text": of_items,
    "perplexity": of_perplexity,
    "multiturn": of_multiturn,
    "lm_eval": of_benchmarks,
    "diagnostics": of_diagnostics,
}


@pytest.fixture(scope="module")
def data_of(
    tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Json]]:
    """The data of a kind's results, each measured once."""
    home, found = tmp_path_factory.mktemp("nothing"), {}
    models = [*toy_models((tiny_folders[1], tiny_folders[1])), "pair.drop_layers=[1]"]
    words = [word for word in VOCABULARY if word.isalpha()]
    for n in range(60):
        drawn = np.random.default_rng(n).choice(words, 80)
        write(home / "text" / f"{n}.txt", " ".join(drawn))
    text = [each for each in models if not each.startswith("corpus.")]
    text += ["corpus=text", f"corpus.path={home / 'text'}", *TEXT_ROWS, "corpus.skip_first=4"]

    def measured(kind: str) -> Json:
        if kind not in found:
            given = text if kind == "text" else models
            asked = little(OPTIONS[kind], home / "outputs", given)
            found[kind] = results_of(run("evaluate", home / "outputs", *given, *asked))["data"]
        return found[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness_tasks, "STORIES", dict.fromkeys(TOY_TASKS, 3))
        yield measured


def verdict_of(kind: str, data: Json) -> Any:
    return REPORTS["items" if kind == "text" else kind].verdict(data)


@pytest.mark.parametrize("kind", AGAIN)
def test_a_map_that_is_worth_it_is_told(kind: str, data_of: Callable[[str], Json]) -> None:
    """Or the other tests would show nothing."""
    said = verdict_of(kind, AGAIN[kind](data_of(kind), scored(LEVELS), ""))
    assert said.kind == "beats"


@pytest.mark.parametrize("control", NOTHING_HANDED)
@pytest.mark.parametrize("kind", AGAIN)
def test_nothing_is_worth_nothing(kind: str, control: str, data_of: Callable[[str], Json]) -> None:
    """As it scored; where it is better than the source; and where it is nearly as good as the ceiling."""
    assert verdict_of(kind, AGAIN[kind](data_of(kind), REAL, control)).kind != "beats"
    for level in (1.5, 1.02):
        said = verdict_of(kind, AGAIN[kind](data_of(kind), scored(LEVELS | {control: level}, takes=control), control))
        assert said.kind == ("unable" if control == "no_context" else "none")


@pytest.mark.parametrize("kind", AGAIN)
def test_a_source_that_is_worth_nothing_is_said_first(kind: str, data_of: Callable[[str], Json]) -> None:
    """The best of maps recovers a gap that need not be there."""
    said = verdict_of(kind, AGAIN[kind](data_of(kind), scored(LEVELS | {"no_context": 1.8}), ""))
    assert said.kind == "unable"
    begins = {"diagnostics": "The source is not shown to predict the next token more as the ceiling does than"}
    source = "small model alone" if kind == "multiturn" else "source"
    assert said.sentence.startswith(
        begins.get(kind, "Cannot tell: this pair cannot show a transfer's worth, since its")
    )
    assert source in said.sentence


@pytest.fixture(scope="module")
def decoding(tiny_folders: tuple[Path, Path]) -> tuple[list[Any], dict[str, Decoded], int]:
    """What every condition writes after a dozen times as many prompts, and the token that ends an answer."""
    whole = ModelSpec(str(tiny_folders[1]))
    pair = load_pair(PairSpec("pruned", replace(whole, drop_layers=(1,)), whole, dtype="float32", device="cpu"))
    items = toy_items(pair.tokenizer, 48, 3, questions=2, seed=0)
    transfer = Transfer(pair, Mapper(random_map(pair, DESIGNS["same"])), Plan("sinks", 4))
    found = Decoder(4, 0, 1.0, 0).decode(transfer, items, 6, lambda n: None)
    many = [replace(item, document=f"{item.document} {n}") for n in range(TIMES) for item in items]
    decoded = {
        name: Decoded(*(np.concatenate([part] * TIMES) for part in (each.tokens, each.samples, each.kl, each.top)))
        for name, each in found.items()
    }
    assert set(decoded) == set(CONDITIONS)
    return many, decoded, int(pair.tokenizer.convert_tokens_to_ids("."))


def written(decoding: tuple[list[Any], dict[str, Decoded], int], score: Score) -> dict[str, Decoded]:
    """The same with other answers and other KL from the ceiling, which has none."""
    items, decoded, dot = decoding
    found = {}
    for name, own in decoded.items():
        tokens, kl = own.tokens.copy(), own.kl.copy()
        for n, item in enumerate(items):
            value, right = score(name, n)
            answer = [*item.answer, dot]
            tokens[n] = 0
            tokens[n, : len(answer)] = answer if right else 0
            kl[n] = 0.0 if name == "ceiling" else value - 1.0
        found[name] = replace(own, tokens=tokens, kl=kl)
    return found


def test_free_decoding_from_nothing_is_worth_nothing(decoding: tuple[list[Any], dict[str, Decoded], int]) -> None:
    items, decoded, dot = decoding

    def said(found: dict[str, Decoded]) -> Any:
        setting = {"new_tokens": 6, "samples": 0, "temperature": 1.0}
        return REPORTS["generation"].verdict(setting | summarise_decoding(items, found, dot))

    assert said(written(decoding, scored(LEVELS))).kind == "beats"
    for control, level in itertools.product(NOTHING_HANDED, (1.5, 1.02)):
        assert said(decoded | {"mapped": decoded[control]}).kind != "beats"
        found = said(written(decoding, scored(LEVELS | {control: level}, takes=control)))
        assert found.kind == ("unable" if control == "no_context" else "none")
    found = said(written(decoding, scored(LEVELS | {"no_context": 1.8})))
    assert found.sentence.startswith("Cannot tell: this pair cannot show a transfer's worth")


def test_every_kind_that_has_a_verdict_is_tested() -> None:
    against = {kind for kind, report in REPORTS.items() if report.against_source}
    assert against == (set(AGAIN) - {"text"}) | {"generation"}
