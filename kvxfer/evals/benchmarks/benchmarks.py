"""Published benchmarks through lm-evaluation-harness, answered on a mapped cache."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.evals.benchmarks.requests import Condition, Handover
from kvxfer.evals.benchmarks.scores import check_measures, gather
from kvxfer.evals.benchmarks.tasks import harness_version, load_tasks, run_tasks
from kvxfer.evals.benchmarks.toy_tasks import TOY_TASKS, write_toy_tasks
from kvxfer.evals.evaluation import Data, Evaluation, Subject
from kvxfer.evals.statistics import paired_item
from kvxfer.report.benchmarks_figure import benchmarks_figure
from kvxfer.report.markdown import table
from kvxfer.report.tables import NOTHING, interval, p_text, p_value, percent, points
from kvxfer.report.verdict import WORDS, Kind, Outcome, Verdict, outcome
from kvxfer.report.wording import condition_name

CONDITIONS: tuple[Condition, ...] = ("ceiling", "source", "mapped", "floor")
_TASK_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl", ".csv")


@dataclass(frozen=True)
class Benchmarks(Evaluation):
    """``eval=lm_eval``: tasks by the harness's names, each under four conditions on the same requests.

    ``limit`` keeps the first samples of every task; ``num_fewshot`` overrides what tasks set, as the harness does;
    ``include_path`` is a folder of further tasks; ``seed`` draws few-shot examples and sampled answers.
    """

    kind = "lm_eval"
    heading = "Published benchmarks"

    tasks: tuple[str, ...] = TOY_TASKS
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 16
    include_path: str | None = None
    log_samples: bool = True
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.tasks:
            raise KvxferError("eval.tasks is empty; name at least one task, as eval.tasks=[toy_choices]")
        twice = sorted({name for name in self.tasks if self.tasks.count(name) > 1})
        if twice:
            raise KvxferError(f"eval.tasks: {', '.join(twice)} is named twice; name every task once")
        for key, least in (("limit", 1), ("num_fewshot", 0), ("batch_size", 1), ("seed", 0)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise KvxferError(f"eval.{key}={value} must be {least} or more")
        if self.include_path is not None and not self._folders():
            raise KvxferError(f"eval.include_path: no folder {self.include_path!r}; give a folder with tasks as YAML")

    def _folders(self) -> list[Path]:
        folder = None if self.include_path is None else Path(self.include_path).expanduser()
        return [folder] if folder is not None and folder.is_dir() else []

    def identity(self) -> dict[str, Any]:
        """Own tasks count by their content, and the harness by its version."""
        fields = {**super().identity(), "harness": harness_version()}
        return fields | {"include_path": _digest(self._folders()[0]) if self.include_path else None}

    def measure(self, subject: Subject) -> dict[str, Any]:
        """All tasks under every condition."""
        pair = subject.pair
        with tempfile.TemporaryDirectory(prefix="kvxfer-tasks-") as scratch:
            folders = self._folders()
            if set(self.tasks) & set(TOY_TASKS):
                write_toy_tasks(Path(scratch), pair.tokenizer, subject.corpus.length)
                folders.append(Path(scratch))
            tasks = load_tasks(self.tasks, folders, self.num_fewshot, self.seed)

            from kvxfer.evals.benchmarks.model import HarnessModel

            def answered(condition: Condition, limit: int | None) -> Mapping[str, Any]:
                handover = Handover(pair, subject.plan, condition, subject.mapper)
                return run_tasks(tasks, HarnessModel(handover, self.batch_size, self.seed), limit, self.seed)

            # What can't be asked or compared shows in one sample of every task, before hours of all of them.
            check_measures(tasks, answered("ceiling", 1))
            logged: dict[str, Mapping[str, Any]] = {name: answered(name, self.limit) for name in CONDITIONS}
            found = gather(tasks, logged, self.log_samples)
        settings = {"limit": self.limit, "num_fewshot": self.num_fewshot, "batch_size": self.batch_size}
        return {
            "harness": harness_version(),
            "settings": {**settings, "seed": self.seed, "longest_context": pair.longest_context},
            **found,
        }

    @classmethod
    def verdict(cls, data: Data) -> Verdict:
        """All samples together against the source, then every task by itself, corrected for their number."""
        pooled, single = data["pooled"], data["benchmarks"]
        test = pooled["tests"]["mapped_vs_source"]
        overall, by_task = (
            _outcome(test),
            {each["name"]: _outcome(each["tests"]["mapped_vs_source"]) for each in single},
        )
        counted = pooled["benchmarks"]
        where = f"on {counted[0]}" if len(counted) == 1 else f"on {len(counted)} benchmarks"
        mixed = {"better", "worse"} <= {overall, *by_task.values()}
        kinds: dict[Outcome, Kind] = {"better": "beats", "worse": "worse", "none": "none"}
        kind: Kind = "mixed" if mixed else kinds[overall]
        said = {
            "better": "beats the source",
            "worse": "is worse than the source",
            "none": "is not shown to beat the source",
        }
        head = f"{WORDS[kind]}: the mapped cache {said[overall]} {where}"
        scores = (percent(pooled["conditions"][name]["accuracy"]) for name in ("mapped", "source"))
        sentence = (
            f"{head}, with {' against '.join(scores)} of {test['n']} questions "
            f"({points(test['accuracy_difference'])}, 95 % interval {interval(test['accuracy_ci'])}, "
            f"{_test_name(test)} {p_text(test['accuracy_p'])})"
        )
        if left_out := [each["name"] for each in single if each["name"] not in counted]:
            sentence += f", without {' and '.join(left_out)}, whose answers are not simply right or wrong"
        if len(single) > 1:
            sentence += f"; by benchmark, corrected for their number (Holm): {_listed(by_task)}"
        return Verdict(kind, head, f"{sentence}.")

    @classmethod
    def sections(cls, data: Data) -> list[str]:
        """Four rows for every benchmark, the tests, and how they were asked."""
        lines = _conditions_table(data)
        lines += ["![Every benchmark with 95 % intervals](figures/lm_eval_benchmarks.png)", ""]
        lines += ["First minus second, on the same samples; p (Holm) is corrected for the number of benchmarks.", ""]
        return [*lines, *_tests_table(data), *_asked(data)]

    @classmethod
    def metrics(cls, data: Data) -> dict[str, float]:
        """Scores of every condition, and what the mapped cache retains."""
        flat: dict[str, float] = {}
        for each in (*data["benchmarks"], {"name": "pooled", **data["pooled"]}):
            flat |= {f"{each['name']}/{name}/score": row["accuracy"] for name, row in each["conditions"].items()}
            for key in ("retention_floor_normalised", "gap_recovered"):
                if (value := each["conditions"]["mapped"][key]) is not None:
                    flat[f"{each['name']}/mapped/{key}"] = value
        return flat

    @classmethod
    def by_task(cls, data: Data) -> dict[str, Mapping[str, Any]]:
        """Every benchmark."""
        return {each["name"]: each["conditions"] for each in data["benchmarks"]}

    @classmethod
    def paired(cls, data: Data) -> dict[str, list[Mapping[str, Any]]]:
        """Every sample, by benchmark: right or wrong, or its score where that is neither."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for each in data["benchmarks"]:
            scores = [(sample, sample["scores"][sample["measure"]]["mapped"]) for sample in each["samples"]]
            if each["binary"]:
                found[each["name"]] = [paired_item(sample, correct=score == 1) for sample, score in scores]
            else:
                found[each["name"]] = [paired_item(sample, score=score) for sample, score in scores]
        return found

    @classmethod
    def figures(cls, data: Data, folder: Path) -> None:
        """Scores by benchmark."""
        benchmarks_figure(data["benchmarks"], folder / "lm_eval_benchmarks.png")


def _digest(folder: Path) -> str:
    """SHA-256 of the names and contents of a folder's task files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _TASK_FILES and path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _outcome(test: Mapping[str, Any]) -> Outcome:
    p = test.get("accuracy_p_holm", test["accuracy_p"])
    return outcome(p, test["accuracy_difference"], test["accuracy_ci"], higher_is_better=True)


def _test_name(test: Mapping[str, Any]) -> str:
    return "exact McNemar" if test["test"] == "mcnemar" else "paired t"


def _listed(by_task: Mapping[str, Outcome]) -> str:
    words = {"better": "better on", "worse": "worse on", "none": "no difference shown on"}
    groups = {said: [name for name, found in by_task.items() if found == key] for key, said in words.items()}
    return ", ".join(f"{said} {' and '.join(names)}" for said, names in groups.items() if names)


def _conditions_table(data: Data) -> list[str]:
    header = ("Benchmark", "Condition", "Score", "95 %", "Retention", "Floor-normalised", "Gap recovered")
    rows = []
    together = [{"name": "all together", **data["pooled"]}] if len(data["pooled"]["benchmarks"]) > 1 else []
    for each in (*data["benchmarks"], *together):
        for name, row in each["conditions"].items():
            label = f"**{each['name']}**" if name == "ceiling" else ""
            ratios = (percent(row[key]) for key in ("retention", "retention_floor_normalised", "gap_recovered"))
            rows.append((label, condition_name(name), percent(row["accuracy"]), interval(row["accuracy_ci"]), *ratios))
    return table(header, rows)


def _tests_table(data: Data) -> list[str]:
    header = ("Benchmark", "Comparison", "Difference", "95 %", "Test", "p", "p (Holm)", "Samples", "Documents")
    rows = []
    together = [{"name": "all together", **data["pooled"]}] if len(data["pooled"]["benchmarks"]) > 1 else []
    for each in (*data["benchmarks"], *together):
        for key, test in each["tests"].items():
            other = {"mapped_vs_source": "source alone", "mapped_vs_ceiling": "ceiling"}[key]
            rows.append(
                (
                    each["name"],
                    f"Mapped cache vs {other}",
                    points(test["accuracy_difference"]),
                    interval(test["accuracy_ci"]),
                    _test_name(test),
                    p_value(test["accuracy_p"]),
                    p_value(test.get("accuracy_p_holm")),
                    str(test["n"]),
                    str(test["documents"]),
                )
            )
    return table(header, rows)


def _asked(data: Data) -> list[str]:
    """How the benchmarks were asked: what a reader needs to ask them again."""
    header = ("Benchmark", "Kind", "Score is", "Answers read by", "Chance", "Shots", "Samples", "Of", "Version")
    rows = [
        (
            each["name"],
            each["kind"],
            each["measure"],
            NOTHING if each["filter"] == "none" else each["filter"],
            percent(each["chance"]),
            str(each["shots"]),
            str(each["n"]),
            str(each["available"]),
            _versions(each["versions"]),
        )
        for each in data["benchmarks"]
    ]
    s = data["settings"]
    limit = "all samples" if s["limit"] is None else f"the first {s['limit']:,} samples of every task"
    lines = [
        f"lm-evaluation-harness {data['harness']}, {limit}, batches of {s['batch_size']}, seed {s['seed']}; what is "
        f"longer than {s['longest_context']:,} tokens is cut from the left.",
        "",
        *table(header, rows),
    ]
    others = [
        (each["name"], measure, *(percent(values[name]) for name in CONDITIONS))
        for each in data["benchmarks"]
        for measure, values in each["others"].items()
    ]
    if others:
        names = [condition_name(name, short=True) for name in CONDITIONS]
        lines += ["Further measures of the same answers:", "", *table(("Benchmark", "Measure", *names), others)]
    return lines


def _versions(versions: Mapping[str, Any]) -> str:
    distinct: Sequence[str] = sorted({str(value) for value in versions.values()})
    count = f" ({len(versions)} tasks)" if len(versions) > 1 else ""
    return ", ".join(distinct) + count
