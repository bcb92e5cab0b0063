"""Questions with answers to choose from, or text that follows a prefix, under every condition on identical items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvxfer.evals.conditions import Controls, Prepared, given_conditions, mapped_conditions, own_conditions
from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.fit_check import FEWEST_TOKENS, check_fit
from kvxfer.evals.gates import run_gates
from kvxfer.evals.items import Batch, batches, choice_items, text_items, toy_items
from kvxfer.evals.scoring import Records, evaluate_items
from kvxfer.evals.specs import QuestionsSpec
from kvxfer.evals.statistics import summarise
from kvxfer.files import read_json
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import SELECTION
from kvxfer.maps.plan import Plan
from kvxfer.maps.random_weights import random_twin
from kvxfer.models.ancestry import find_ancestry
from kvxfer.models.pair import Pair
from kvxfer.progress import progress
from kvxfer.text.corpus import load_rows
from kvxfer.text.spec import CorpusSpec

CHECKED_TOKENS = 2048
"""Of the prompts, so many tokens tell R² to far less than what the check of the fit tolerates."""


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
        return plan.holding_back(self.prompt - self.batches[0].context)


@dataclass(frozen=True)
class Questions(QuestionsSpec, Evaluation):
    """Every item under every condition that is asked for."""

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Every item under every condition; what does not depend on the map is shared with other maps.

        Raises:
            KvxferError: a gate fails; nothing is to be recorded then.
        """
        asked = self.ask(subject)
        plan = subject.plan
        baseline = subject.shared(
            "baseline",
            ("name", "conditions"),
            {"tables": 2 if asked.two_tables else 1},
            lambda: _baseline(subject.pair, plan, asked),
        )
        random, second, tables = self._random(subject), baseline["story_only"], {}
        with progress(f"evaluate {subject.pair.name}", asked.items * (2 if second else 1), "items") as advance:
            records = _score(subject.transfer, random, asked, baseline["items"], advance)
            if second:
                question = replace(subject.transfer, plan=asked.question(plan))
                tables["story_only"] = summarise(_score(question, random, asked, second, advance))
        ancestry, selection = find_ancestry(subject.pair), subject.directory / SELECTION
        return {
            **summarise(records),
            "prompt_tokens": asked.prompt,
            "tables": tables,
            "ancestry": None if ancestry is None else ancestry.to_dict(),
            "gates": baseline["gates"],
            "fit_check": _check_fit(subject, asked),
            "selection": read_json(selection) if selection.is_file() else None,
            "items": records,
        }

    def check(self, pair: Pair, corpus: CorpusSpec, plan: Plan) -> None:
        pair.check_length(self.length or corpus.length, "eval.length" if self.length else "corpus.length")

    def ask(self, subject: Subject) -> Asked:
        """The items for this pair."""
        corpus, pair = subject.corpus, subject.pair
        self.check(pair, corpus, subject.plan)
        length = self.length or corpus.length
        toy = corpus.kind == "toy"
        if toy:
            items = toy_items(pair.tokenizer, length, self.stories, self.questions, self.seed)
        elif self.choices:
            how = (self.choices, self.answer, self.questions, self.score_rest)
            items = choice_items(corpus, pair.tokenizer, length, *how)
        else:
            items = text_items(corpus, pair.tokenizer, length, self.prefix)
        stop = pair.tokenizer.convert_tokens_to_ids(".") if toy and self.generate else None
        return Asked(list(batches(items, self.batch_size)), stop, toy and self.conditions == "all")

    def _random(self, subject: Subject) -> Transfer | None:
        """The handover by a random map of the fitted one's size, where that is a condition."""
        if self.conditions != "all":
            return None
        twin = random_twin(subject.cache_map, subject.pair.target.geometry.kv_heads)
        mapper = Mapper(twin, subject.pair.target.device, subject.mapper.dtype, subject.pair)
        return replace(subject.transfer, mapper=mapper)


def _score(
    transfer: Transfer,
    random: Transfer | None,
    asked: Asked,
    known: list[dict[str, Any]],
    advance: Callable[[int], None],
) -> list[dict[str, Any]]:
    """The items' records with the conditions of the map; the others are taken over from the known ones."""

    def conditions(batch: Batch) -> dict[str, Prepared]:
        controls = None if random is None else Controls(batch.donors, replace(random, plan=transfer.plan))
        return mapped_conditions(transfer, batch.prompt, controls)

    records = {item["id"]: item for item in known}
    return list(evaluate_items(asked.batches, conditions, asked.stop, advance, records).values())


def _baseline(pair: Pair, plan: Plan, asked: Asked) -> dict[str, Any]:
    """The gates, and the scores of every condition that needs no map: under the plan, and for the second table."""
    gates = run_gates(pair, asked.batches[0])
    second: Records = {}

    def given(batch: Batch, plan: Plan = plan) -> dict[str, Prepared]:
        return given_conditions(pair, plan, batch.prompt)

    def all_of(batch: Batch) -> dict[str, Prepared]:
        return {**own_conditions(pair, batch.prompt, batch.context), **given(batch)}

    with progress(f"baselines {pair.name}", asked.items * (2 if asked.two_tables else 1), "items") as advance:
        records = evaluate_items(asked.batches, all_of, asked.stop, advance)
        if asked.two_tables:
            question = partial(given, plan=asked.question(plan))
            second = evaluate_items(asked.batches, question, asked.stop, advance, baselines=records)
    both = {"items": list(records.values()), "story_only": list(second.values())}
    return {"gates": gates, "prompt_tokens": asked.prompt, **both}


def _check_fit(subject: Subject, asked: Asked) -> dict[str, Any] | None:
    """Whether the map does on some of the evaluation's text, each row about another document, what its fit reported.

    None where the fit recorded nothing, and where all rows together are too short to tell.
    """
    length, plan, pair = asked.prompt, subject.plan, subject.pair
    first, stop = plan.mapped_span(length)
    count = max(1, CHECKED_TOKENS // length)
    if subject.corpus.kind == "toy":
        # Stories alone, which its questions follow, are another text than the rows that a map is fitted on.
        ids = load_rows(subject.corpus, pair.tokenizer, "evaluation", count, length).tokens
    else:
        prompts = {item.document: item.prompt for batch in asked.batches for item in batch.items}
        ids = torch.tensor([prompt for prompt in prompts.values() if len(prompt) == length][:count])
    if len(ids) * (stop - first) < FEWEST_TOKENS:
        return None
    return check_fit(subject.transfer, subject.cache_map, subject.directory, ids)
