"""Free decoding over the mapped cache: is the answer right, and when does the text part from the ceiling's?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.evals.decoding import CONDITIONS, Decoded, Decoder
from kvxfer.evals.divergence import OTHERS, summarise_decoding
from kvxfer.evals.evaluation import Data, Evaluation, Subject
from kvxfer.evals.items import EvalSpec, Item, toy_items
from kvxfer.evals.statistics import paired_item
from kvxfer.progress import progress
from kvxfer.report.figures import COLOURS, CONTROL
from kvxfer.report.markdown import table
from kvxfer.report.series import Panel, Series, series_figure
from kvxfer.report.tables import interval, number, p_value, percent, points
from kvxfer.report.verdict import Verdict, verdict
from kvxfer.report.wording import condition_name
from kvxfer.text.corpus import load_rows

EXAMPLES = 3
FREE_CHOICE = [
    "An exact match is the answer and the dot after it. What follows is a question that the model asks itself, where "
    "one is as good as another: texts part there sooner than at an answer.",
    "",
]
MODES = ("greedy", "sampled")


@dataclass(frozen=True)
class Generation(Evaluation):
    """``eval=generation``: ``new_tokens`` written freely after every prompt, greedily and in ``samples`` samples.

    Prompts are ``questions`` about each of so many toy ``stories``, or ``prefix`` tokens (none: half of corpus.length)
    of so many ``rows`` of other text.
    """

    kind = "generation"
    heading = "Free decoding"

    stories: int = 60
    questions: int = 4
    rows: int = 64
    prefix: int | None = None
    new_tokens: int = 16
    samples: int = 3
    temperature: float = 1.0
    batch_size: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        for key, least in (("stories", 2), ("questions", 1), ("rows", 2), ("new_tokens", 1), ("batch_size", 1)):
            if getattr(self, key) < least:
                raise KvxferError(f"eval.{key}={getattr(self, key)} must be {least} or more")
        for key in ("samples", "seed"):
            if getattr(self, key) < 0:
                raise KvxferError(f"eval.{key}={getattr(self, key)} must be 0 or more")
        if not 0 < self.temperature < float("inf"):
            raise KvxferError(f"eval.temperature={self.temperature} must be above 0 (greedy decoding is always there)")
        if self.prefix is not None and self.prefix < 2:
            raise KvxferError(f"eval.prefix={self.prefix} must be 2 tokens or more, or null")

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Decode everything under every condition."""
        pair = subject.pair
        toy = subject.corpus.kind == "toy"
        items = self._items(subject, toy)
        longest = max(len(item.answer) for item in items) + 1
        if toy and self.new_tokens < longest:
            raise KvxferError(f"eval.new_tokens={self.new_tokens} must be {longest} or more: an answer and its dot")
        pair.check_length(max(len(item.prompt) for item in items) + self.new_tokens, "eval.new_tokens")
        decoder = Decoder(self.new_tokens, self.samples, self.temperature, self.seed)
        with progress(f"generation {pair.name}", len(items), "prompts") as advance:
            decoded = decoder.decode(subject.transfer, items, self.batch_size, advance)
        dot = pair.tokenizer.convert_tokens_to_ids(".") if toy else None
        setting = {key: getattr(self, key) for key in ("new_tokens", "samples", "temperature")}
        examples = [_example(pair.tokenizer, items, decoded, n) for n in _spread(len(items), EXAMPLES)]
        return {**setting, "prompts": len(items), **summarise_decoding(items, decoded, dot), "examples": examples}

    def _items(self, subject: Subject, toy: bool) -> list[Item]:
        corpus, tokenizer = subject.corpus, subject.pair.tokenizer
        if toy:
            asked = EvalSpec(stories=self.stories, questions=self.questions, seed=self.seed)
            return toy_items(asked, tokenizer, corpus.length)
        prefix = corpus.length // 2 if self.prefix is None else self.prefix
        rows = load_rows(corpus, tokenizer, "evaluation", self.rows, prefix)
        named = enumerate(zip(rows.tokens.tolist(), rows.documents, strict=True))
        return [Item(str(n), documents[0], rows.domain, tuple(row), prefix, ()) for n, (row, documents) in named]

    @classmethod
    def verdict(cls, data: Data) -> Verdict:
        """Against the source: exact match where there are answers, and how far from the ceiling's predictions."""
        test = data["tests"]["mapped_vs_source"]
        row = {"nll_p": test["kl_p"], "nll_difference": test["kl_difference"], "nll_ci": test["kl_ci"]}
        row |= {f"accuracy_{key}": test[f"exact_{key}"] for key in ("p", "difference", "ci")}
        found = {
            name: {"accuracy": data["conditions"][name]["exact"], "nats": data["conditions"][name]["kl"]}
            for name in ("mapped", "source")
        }
        said = verdict(found, {"mapped_vs_source": row}, subject="Writing from the mapped cache")
        words = {
            "accuracy": "exact match",
            "nats per token": "nats of KL from the ceiling per token",
            "in nats": "in KL",
        }
        head, sentence = said.head, said.sentence
        for plain, meant in words.items():
            head, sentence = head.replace(plain, meant), sentence.replace(plain, meant)
        return Verdict(said.kind, head, f"{sentence} {_divergence_sentence(data)}")

    @classmethod
    def sections(cls, data: Data) -> list[str]:
        """Both ways of decoding, the tests, the figures and some of what was written."""
        lines = [
            f"After each of {data['prompts']} prompts {data['new_tokens']} tokens are written freely: greedily, and in "
            f"{data['samples']} samples at temperature {data['temperature']:g} that all conditions draw with the same "
            "random numbers, so that a difference is the cache's and not the dice's.",
            "",
            "Agreement: the share of tokens that are the ceiling's at the same place. Parts: the first token that is "
            "not the ceiling's, in the median. Never parts: the share of texts that are the ceiling's to the end. KL: "
            "nats per token from the ceiling's next-token distribution, along the ceiling's own tokens, so that both "
            "have read the same; same top token: how often the likeliest token is the same there.",
            "",
            *(FREE_CHOICE if data["answers"] else []),
            *_conditions_table(data),
            "![Agreement with the ceiling and KL by step](figures/generation_steps.png)",
            "",
            "![Share of texts that are still the ceiling's](figures/generation_divergence.png)",
            "",
            "### Mapped cache against the source and the ceiling",
            "",
            *_tests_table(data),
        ]
        rows = [
            (f"… {example['prompt']}", condition_name(name, short=True), example[name])
            for example in data["examples"]
            for name in CONDITIONS
        ]
        return [*lines, "### What is written", "", *table(("After", "By", "Greedily"), rows, right=False)]

    @classmethod
    def metrics(cls, data: Data) -> dict[str, float]:
        """Every number of every condition."""
        return {
            f"{name}/{key}": value
            for name, row in data["conditions"].items()
            for key, value in row.items()
            if isinstance(value, int | float)
        }

    @classmethod
    def paired(cls, data: Data) -> dict[str, list[Mapping[str, Any]]]:
        """Every prompt: the KL, and exact match where there are answers."""
        items = [paired_item(i, nats=i["kl"]["mapped"], correct=i["exact"]["mapped"]) for i in data["items"]]
        return {"exact match, KL from the ceiling" if data["answers"] else "KL from the ceiling": items}

    @classmethod
    def figures(cls, data: Data, folder: Path) -> None:
        """Agreement and KL by step, and the share of texts that have not parted yet."""

        def lines(measure: str, least: float | None = None) -> list[Series]:
            found = []
            for name in OTHERS:
                step = data["steps"][name]
                values, ends = step[measure], step[f"{measure}_ci"]
                if least is not None:
                    values, ends = [max(v, least) for v in values], [[max(e, least) for e in pair] for pair in ends]
                places = range(1, len(values) + 1)
                found.append(Series(condition_name(name, short=True), places, values, ends, COLOURS.get(name, CONTROL)))
            return found

        agreement = Panel("tokens that are the ceiling's", "new token", lines("agreement"), limits=(0.0, 1.03))
        kl = Panel("KL from the ceiling (nats)", "new token", lines("kl", 1e-6), log=True)
        series_figure([agreement, kl], folder / "generation_steps.png")
        modes = MODES if data["samples"] else MODES[:1]
        panels = [
            Panel(f"texts still the ceiling's, {mode}", "new tokens", lines(f"same_{mode}"), limits=(0.0, 1.03))
            for mode in modes
        ]
        series_figure(panels, folder / "generation_divergence.png")


def _spread(count: int, wanted: int) -> list[int]:
    """So many places spread over all, or all."""
    return sorted({n * count // wanted for n in range(wanted)})


def _example(tokenizer: Any, items: Sequence[Item], decoded: Mapping[str, Decoded], n: int) -> dict[str, str]:
    """The end of a prompt and what each condition writes greedily."""
    written = {name: tokenizer.decode(found.tokens[n].tolist()) for name, found in decoded.items()}
    return {"id": items[n].id, "prompt": tokenizer.decode(list(items[n].prompt[-8:])), **written}


def _divergence_sentence(data: Data) -> str:
    """When the mapped cache's text parts from the ceiling's."""
    row = data["conditions"]["mapped"]
    never = f"{percent(row['never'])} of the greedy texts are the ceiling's for all {data['new_tokens']} tokens"
    if row["parts"] is None:
        return f"{never}."
    return f"{never}; the median text parts from it at token {row['parts']:g}."


def _conditions_table(data: Data) -> list[str]:
    """Greedy and sampled columns side by side."""
    header = ("Condition", "Exact match", "Agreement", "Never parts", "Parts", "KL", "Same top token")
    sampled = ("Exact match (sampled)", "Agreement (sampled)", "Never parts (sampled)", "Parts (sampled)")
    rows = []
    for name, row in data["conditions"].items():
        cells = [condition_name(name)]
        for key in ("exact", "agreement", "never"):
            cells.append(f"{percent(row[key])} {interval(row[f'{key}_ci'])}".rstrip())
        cells.append(_place(row["parts"], row["never"]))
        cells += [f"{number(row['kl'])} {interval(row['kl_ci'], 'number')}", percent(row["top"])]
        cells += [percent(row[f"{key}_sampled"]) for key in ("exact", "agreement", "never")]
        cells.append(_place(row["parts_sampled"], row["never_sampled"]))
        rows.append(cells)
    return table((*header, *sampled), rows)


def _place(median: float | None, never: float | None) -> str:
    return "" if never is None else "after the last" if median is None else f"{median:g}"


def _tests_table(data: Data) -> list[str]:
    """First minus second on the same prompts."""
    measures = {
        "exact": "Exact match",
        "exact_sampled": "Exact match (sampled)",
        "agreement": "Agreement",
        "agreement_sampled": "Agreement (sampled)",
        "kl": "KL (nats)",
    }
    rows = []
    for key, test in data["tests"].items():
        other = key.removeprefix("mapped_vs_")
        for measure, label in measures.items():
            difference = test[f"{measure}_difference"]
            # All of these are set against the ceiling as they are.
            if difference is None or (other == "ceiling" and not measure.startswith("exact")):
                continue
            ends = test[f"{measure}_ci"]
            said = (number(difference, sign=True), interval(ends, "number"))
            if measure != "kl":
                said = (points(difference), interval(ends))
            kind = "exact McNemar" if measure == "exact" else "paired t"
            rows.append((f"{label}, against the {other}", *said, p_value(test[f"{measure}_p"]), kind))
    note = f"First minus second; {test['n']} prompts about {test['documents']} documents."
    return [note, "", *table(("Measure", "Difference", "95 %", "p", "Test"), rows)]
