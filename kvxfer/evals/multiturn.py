"""A conversation that changes models at every turn: does what is lost add up?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Data, Evaluation, Subject
from kvxfer.evals.statistics import paired_difference, paired_item, summarise
from kvxfer.evals.turns import DOWN, LARGE, PATTERNS, SMALL, UP, Handed, Stage, play, text_talks, toy_talks
from kvxfer.progress import progress
from kvxfer.report.figures import COLOURS
from kvxfer.report.markdown import table
from kvxfer.report.series import Panel, Series, series_figure
from kvxfer.report.tables import interval, number, p_text, p_value, percent, points
from kvxfer.report.verdict import Verdict, verdict

NAMES = {"up": "Up: small to large", "down": "Down: large to small", "ping_pong": "Ping-pong"}
HANDED = {"up": "up", "down": "down", "ping_pong": "to and fro"}


@dataclass(frozen=True)
class Multiturn(Evaluation):
    """``eval=multiturn``: at every turn the drift of the answering model from its own prefill, by pattern.

    ``stories`` are conversations of the toy world, ``rows`` those of other text; a turn has ``segment`` tokens of
    either. ``reverse_map`` is the map of the other direction (a run or its directory; none: the one that the run's
    settings give).
    """

    kind = "multiturn"
    heading = "Many turns"

    turns: int = 6
    stories: int = 100
    rows: int = 32
    segment: int = 16
    patterns: tuple[str, ...] = tuple(PATTERNS)
    max_hops: int | None = None
    reverse_map: str | None = None
    batch_size: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        for key, least in (("turns", 2), ("stories", 2), ("rows", 2), ("segment", 2), ("batch_size", 1), ("seed", 0)):
            if getattr(self, key) < least:
                raise KvxferError(f"eval.{key}={getattr(self, key)} must be {least} or more")
        if self.max_hops is not None and self.max_hops < 0:
            raise KvxferError(f"eval.max_hops={self.max_hops} must be 0 or more, or null for no limit")
        if not self.patterns or not set(self.patterns) <= set(PATTERNS):
            raise KvxferError(f"eval.patterns={list(self.patterns)}: name one or more of {', '.join(PATTERNS)}")

    def identity(self) -> dict[str, Any]:
        """What decides the numbers; the map of the other direction is an input of the run instead."""
        return {key: value for key, value in super().identity().items() if key != "reverse_map"}

    def needs_reverse(self, reverse: bool) -> bool:
        """Whether a pattern hands over in the other direction than the run's own."""
        wanted = {direction for pattern in self.patterns for direction in PATTERNS[pattern]}
        return bool(wanted - {DOWN if reverse else UP})

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Every conversation under every pattern."""
        pair = subject.pair
        toy = subject.corpus.kind == "toy"
        longest = self.turns * (self.segment + 4) if toy else (self.turns + 1) * self.segment
        pair.check_length(longest, "eval.turns, eval.segment")
        if toy:
            talks = toy_talks(self.stories, self.turns, self.segment, pair.tokenizer, self.seed)
        else:
            talks = text_talks(subject.corpus, self.rows, self.turns, self.segment, pair.tokenizer)
        with progress(f"multiturn {pair.name}", len(talks), "conversations") as advance:
            records, handed = play(self._stage(subject), talks, self.patterns, self.batch_size, advance)
        found = {pattern: summarise_pattern(records, pattern, handed[pattern]) for pattern in self.patterns}
        models = {"small": pair.source.name, "large": pair.target.name}
        if pair.spec.reverse:
            models = {"small": pair.target.name, "large": pair.source.name}
        setting = {"turns": self.turns, "segment": self.segment, "max_hops": self.max_hops, "models": models}
        return {**setting, "conversations": len(talks), "answers": toy, "patterns": found, "items": records}

    def _stage(self, subject: Subject) -> Stage:
        own, other = (DOWN, UP) if subject.pair.spec.reverse else (UP, DOWN)
        transfers = {own: subject.transfer}
        if subject.reverse is not None:
            transfers[other] = subject.reverse
        models = dict(zip(own, (subject.pair.source, subject.pair.target), strict=True))
        return Stage(models, transfers, self.max_hops)

    @classmethod
    def verdict(cls, data: Data) -> Verdict:
        """The first pattern (up, unless it was left out), all turns together, against the small model alone."""
        pattern, found = next(iter(data["patterns"].items()))
        pooled = found["pooled"]
        subject = f"The cache handed {HANDED[pattern]} over {data['turns']} turns"
        said = verdict(pooled["conditions"], pooled["tests"], subject=subject)
        # What is called the source elsewhere is the sender of one direction only.
        head, sentence = (text.replace("the source", "the small model alone") for text in (said.head, said.sentence))
        return Verdict(said.kind, head, f"{sentence} {_drift_sentence(found)}")

    @classmethod
    def sections(cls, data: Data) -> list[str]:
        """What was played, a table per pattern, and the figure."""
        lines = [*_about(data), "![Drift by turn, with 95 % intervals](figures/multiturn_drift.png)", ""]
        for pattern, found in data["patterns"].items():
            lines += [f"### {NAMES[pattern]}", "", _drift_sentence(found), "", *_table(found, data["answers"])]
        return lines

    @classmethod
    def metrics(cls, data: Data) -> dict[str, float]:
        """Nats lost against the ceiling by pattern and turn, over all turns, and more of it each turn."""
        flat: dict[str, float] = {}
        for pattern, found in data["patterns"].items():
            for row in found["turns"]:
                flat[f"{pattern}/{row['turn']}/drift_nats"] = row["tests"]["mapped_vs_ceiling"]["nll_difference"]
                if data["answers"]:
                    flat[f"{pattern}/{row['turn']}/accuracy"] = row["conditions"]["mapped"]["accuracy"]
            flat[f"{pattern}/drift_nats"] = found["pooled"]["tests"]["mapped_vs_ceiling"]["nll_difference"]
            if found["slope_nats"] is not None:
                flat[f"{pattern}/slope_nats"] = found["slope_nats"]["difference"]
        return flat

    @classmethod
    def paired(cls, data: Data) -> dict[str, list[Mapping[str, Any]]]:
        """Every turn of every conversation, by pattern."""
        return {
            NAMES[pattern]: [
                paired_item(i, i["nats"][pattern], i.get("correct", {}).get(pattern), tokens=i["tokens"])
                for i in data["items"]
            ]
            for pattern in data["patterns"]
        }

    @classmethod
    def figures(cls, data: Data, folder: Path) -> None:
        """Drift by turn: of accuracy where there are answers, and of nats."""
        measures = [("accuracy", "accuracy against the ceiling (pp)", 100.0)] if data["answers"] else []
        measures.append(("nll", "nats per token against the ceiling", 1.0))
        panels = []
        for key, label, scale in measures:
            lines = []
            for pattern, found in data["patterns"].items():
                tests = [(row["turn"], row["tests"]["mapped_vs_ceiling"]) for row in found["turns"]]
                values = [scale * test[f"{key}_difference"] for _, test in tests]
                ends = [[scale * end for end in test[f"{key}_ci"]] for _, test in tests]
                lines.append(Series(NAMES[pattern], [turn for turn, _ in tests], values, ends))
            if "up" in data["patterns"]:
                lines.append(_gap(data["patterns"]["up"]["turns"], "nats" if key == "nll" else key, scale))
            panels.append(Panel(label, "turn", lines, zero="ceiling"))
        series_figure(panels, folder / "multiturn_drift.png")


def _gap(turns: Sequence[Mapping[str, Any]], key: str, scale: float) -> Series:
    """What there is to lose: the small model alone, less the large one's own prefill."""
    values = [scale * (row["conditions"]["source"][key] - row["conditions"]["ceiling"][key]) for row in turns]
    places = [row["turn"] for row in turns]
    return Series(
        "Small alone, against the large", places, values, [None] * len(values), COLOURS["identity"], dashed=True
    )


def summarise_pattern(records: Sequence[Mapping[str, Any]], pattern: str, handed: Sequence[Handed]) -> dict[str, Any]:
    """One pattern against the answering model's own prefill (``ceiling``) and the small model alone (``source``)."""
    by_turn: list[list[dict[str, Any]]] = [[] for _ in handed]
    for record in records:
        number = record["turn"] - 1
        by_turn[number].append(_compared(record, pattern, handed[number].answering))
    turns = [
        {"turn": number + 1, **asdict(given), **_without_kinds(summarise(items))}
        for number, (given, items) in enumerate(zip(handed, by_turn, strict=True))
    ]
    slopes = {f"slope_{measure}": _slope(by_turn, handed, measure) for measure in ("nats", "correct")}
    return {"turns": turns, "pooled": _without_kinds(summarise([i for items in by_turn for i in items])), **slopes}


def _compared(record: Mapping[str, Any], pattern: str, answering: str) -> dict[str, Any]:
    """The record with the conditions that a turn of a pattern is compared with."""
    names = {"ceiling": answering, "source": SMALL, "mapped": pattern}
    scores = {
        measure: {condition: record[measure][name] for condition, name in names.items()}
        for measure in ("nats", "correct")
        if record.get(measure)
    }
    return {**record, **scores}


def _without_kinds(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key != "by_kind"}


def _slope(
    by_turn: Sequence[Sequence[Mapping[str, Any]]], handed: Sequence[Handed], measure: str
) -> dict[str, float | int] | None:
    """How much the drift grows each turn: the mean over conversations of each one's least-squares slope.

    Turns are centred for each answering model by itself, so that the difference between two models is no slope. Turns
    before anything was mapped have no drift and are left out. None if that leaves no model with two turns.
    """
    chosen = [n for n, given in enumerate(handed) if given.mapped]
    if measure not in by_turn[0][0] or not chosen:
        return None
    x = np.array(chosen, dtype=np.float64)
    for name in (SMALL, LARGE):
        own = [n for n, turn in enumerate(chosen) if handed[turn].answering == name]
        if own:
            x[own] -= x[own].mean()
    if not np.any(x):
        return None
    drift: Float[np.ndarray, "conversations turns"] = np.array(
        [[_drift(item, measure) for item in by_turn[turn]] for turn in chosen], dtype=np.float64
    ).T
    slopes = drift @ x / (x @ x)
    return paired_difference(slopes, np.zeros_like(slopes), [item["document"] for item in by_turn[0]])


def _drift(item: Mapping[str, Any], measure: str) -> float:
    per = item["tokens"] if measure == "nats" else 1
    return (float(item[measure]["mapped"]) - float(item[measure]["ceiling"])) / per


def _about(data: Data) -> list[str]:
    """What the tables are of, in sentences."""
    what = (
        "Every turn tells some facts and asks about all that was told so far; the answer then stands in the text."
        if data["answers"]
        else "Every turn adds a segment of text; what is scored is the segment that follows."
    )
    limit = "" if data["max_hops"] is None else f" A token of more than {data['max_hops']} hops is read again."
    return [
        f"{data['conversations']} conversations of {data['turns']} turns of {data['segment']} tokens. {what} Only new "
        "tokens are mapped at a turn; what a model computed itself it keeps. Up: the small model reads, the large one "
        "answers. Down: the other way round. Ping-pong: each turn's model reads and answers, and is handed what was "
        f"said before.{limit}",
        "",
        "Drift is the answering model on what it was handed, less the same model on its own prefill (its ceiling), on "
        "the same questions; p is not corrected for the number of turns. Hops are the most maps between any token and "
        "the text: a token that a model reads after mapped ones has as many as they have.",
        "",
    ]


def _drift_sentence(found: Mapping[str, Any]) -> str:
    """Over all turns, and whether it grows."""
    test = found["pooled"]["tests"]["mapped_vs_ceiling"]
    parts = [
        f"{number(test['nll_difference'], sign=True)} nats per token {interval(test['nll_ci'], 'number')}, "
        f"{p_text(test['nll_p'])}"
    ]
    if test["accuracy_p"] is not None:
        said = f"{points(test['accuracy_difference'])} {interval(test['accuracy_ci'])}, {p_text(test['accuracy_p'])}"
        parts.insert(0, f"{said} in accuracy")
    slope = found["slope_nats"]
    if slope is None:
        return f"Against the ceiling: {' and '.join(parts)}."
    low, high, p = slope["ci_low"], slope["ci_high"], slope["t_p"]
    known = p < 0.05 and not low <= 0 <= high
    grows = ("grows" if slope["difference"] > 0 else "shrinks") if known else "is not shown to grow or shrink"
    by = f"{number(slope['difference'], 4, sign=True)} nats per token each turn [{number(low, 4)}, {number(high, 4)}]"
    return f"Against the ceiling: {' and '.join(parts)}. The drift {grows} with the turns ({by}, paired t {p_text(p)})."


def _table(found: Mapping[str, Any], answers: bool) -> list[str]:
    """A row per turn, and one of all."""
    accuracy = ("Mapped", "Ceiling", "Small alone", "Drift", "95 %", "p")
    nats = ("Nats", "Ceiling", "Small alone", "Drift (nats)", "95 %", "p")
    rows = []
    for row in (*found["turns"], {"turn": "all", **found["pooled"]}):
        test = row["tests"]["mapped_vs_ceiling"]
        share = percent(row["mapped"] / row["tokens"]) if row.get("tokens") else ""
        cells = [str(row["turn"]), str(row.get("answering", "")), str(row.get("hops", "")), share]
        conditions = [row["conditions"][name] for name in ("mapped", "ceiling", "source")]
        if answers:
            cells += [percent(c["accuracy"]) for c in conditions]
            cells += [points(test["accuracy_difference"]), interval(test["accuracy_ci"]), p_value(test["accuracy_p"])]
        cells += [number(c["nats"]) for c in conditions]
        cells += [number(test["nll_difference"], sign=True), interval(test["nll_ci"], "number"), p_value(test["nll_p"])]
        rows.append(cells)
    return table(("Turn", "Answers", "Hops", "Mapped tokens", *(accuracy if answers else ()), *nats), rows)
