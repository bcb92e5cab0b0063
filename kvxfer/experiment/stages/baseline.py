"""The conditions that do not depend on a map, scored once for a pair and taken over by every map's evaluation."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kvxfer.evals.conditions import Prepared, given_conditions, own_conditions
from kvxfer.evals.gates import run_gates
from kvxfer.evals.items import Batch, batches, choice_items, text_items, toy_items
from kvxfer.evals.records import Records, evaluate_items, held_back_question
from kvxfer.experiment.identity import identity
from kvxfer.experiment.runs import open_run
from kvxfer.experiment.settings import EvaluateSettings
from kvxfer.files import read_json, write_json
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from kvxfer.progress import progress

log = logging.getLogger("kvxfer")

BASELINE = "baseline.json"


@dataclass(frozen=True)
class Asked:
    """What an evaluation asks: its items in batches, and the token that ends a free answer (None: no free answers)."""

    batches: list[Batch]
    stop: int | None
    two_tables: bool

    @property
    def items(self) -> int:
        """How many items there are."""
        return sum(len(batch.items) for batch in self.batches)

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return int(self.batches[0].prompt.shape[1])

    def question(self, plan: Plan) -> Plan:
        """The plan of the second table: the target reads the question itself."""
        return plan.holding_back(held_back_question(self.batches[0]))


@dataclass(frozen=True)
class Baselines:
    """Scores of a baseline run: ``records`` under the plan, ``second`` for the second table (None without one)."""

    id: str
    gates: list[dict[str, Any]]
    records: Records
    second: Records | None


def ask(settings: EvaluateSettings, pair: Pair) -> Asked:
    """The items of an evaluation of this pair."""
    spec, corpus = settings.items, settings.corpus
    length = spec.length or corpus.length
    pair.check_length(length, "eval.length" if spec.length else "corpus.length")
    toy = corpus.kind == "toy"
    if toy:
        items = toy_items(spec, pair.tokenizer, length)
    else:
        items = (choice_items if spec.choices else text_items)(spec, corpus, pair.tokenizer, length)
    stop = pair.tokenizer.convert_tokens_to_ids(".") if toy and spec.generate else None
    return Asked(list(batches(items, spec.batch_size)), stop, toy and spec.conditions == "all")


def baseline_config(settings: EvaluateSettings, two_tables: bool) -> dict[str, Any]:
    """What decides the baselines; options' names do not."""
    return {
        "pair": settings.pair_identity,
        "corpus": settings.read(settings.corpus),
        "eval": {**settings.asked(("name", "conditions")), "tables": 2 if two_tables else 1},
        "plan": identity(settings.plan, ["name"]),
    }


def find_baselines(settings: EvaluateSettings, pair: Pair, asked: Asked) -> Baselines:
    """The baselines of an evaluation, scored now if they are missing.

    Raises:
        KvxferError: a gate fails; nothing is recorded then.
    """
    config = baseline_config(settings, asked.two_tables)
    with open_run(settings.outputs, "baseline", config, {}) as run:
        if run.done:
            log.info("baselines %s are there already", run.id)
        else:
            write_json(run.work / BASELINE, _score(settings, pair, asked))
            run.commit()
    found = read_json(run.path / BASELINE)
    first, second = ({item["id"]: item for item in found[key]} for key in ("items", "story_only"))
    return Baselines(run.id, found["gates"], first, second or None)


def _score(settings: EvaluateSettings, pair: Pair, asked: Asked) -> dict[str, Any]:
    gates = run_gates(pair, asked.batches[0])
    plan, second = settings.plan, []

    def all_of(batch: Batch) -> dict[str, Prepared]:
        return {**own_conditions(pair, batch.prompt, batch.context), **given_conditions(pair, plan, batch.prompt)}

    with progress(f"baselines {pair.name}", asked.items * (2 if asked.two_tables else 1), "items") as advance:
        records = evaluate_items(asked.batches, all_of, asked.stop, advance)
        if asked.two_tables:
            question = asked.question(plan)

            def given(batch: Batch) -> dict[str, Prepared]:
                return given_conditions(pair, question, batch.prompt)

            second = list(evaluate_items(asked.batches, given, asked.stop, advance, baselines=records).values())
    return {"gates": gates, "prompt_tokens": asked.prompt, "items": list(records.values()), "story_only": second}
