"""What eval=perplexity tells a reader: levels at every length, what lengths change, and what could not be asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.evals.lengths import by_length, length_sentence
from kvxfer.report.markdown import table
from kvxfer.report.tables import NOTHING, interval, number, p_value, percent, perplexity, points

Data = Mapping[str, Any]
LEVELS = ("ceiling", "source", "mapped", "raw_copy", "floor")


def introduction(data: Data) -> list[str]:
    """What was scored after what, in a paragraph."""
    sentences = [
        f"The last {data['scored']} tokens of every row are scored after prefixes of several lengths. They are the "
        "same tokens at every length, so lengths differ in nothing but what came before."
    ]
    if any(not domain["lengthened"] for domain in data["domains"]):
        sentences.append("Of text, a shorter prefix is the end of a longer one.")
    if any(domain["lengthened"] for domain in data["domains"]):
        sentences.append(
            "Of the toy world, a longer prefix tells the same facts with more sentences between them that say nothing "
            "of what is asked."
        )
    calibrated = data["calibrated_length"]
    if calibrated is not None:
        sentences.append(f"The map was calibrated on rows of {calibrated} tokens.")
    return [" ".join(sentences), ""]


def levels_table(data: Data) -> list[str]:
    """Perplexity of every condition, and the map against the source, by domain and length."""
    header = ["Text", "Prefix", "Ceiling", "Source", "Mapped", "Raw copy", "Zeroed"]
    header += ("Gap recovered (nats)", "95 % interval", "Mapped \N{MINUS SIGN} source", "95 % interval", "p")
    rows = []
    for point in data["points"]:
        conditions, test = point["conditions"], point["tests"]["mapped_vs_source"]
        mapped = conditions["mapped"]
        share = (percent(mapped["gap_recovered_nats"]), interval(mapped["gap_recovered_nats_ci"]))
        against = (
            number(test["nll_difference"], sign=True),
            interval(test["nll_ci"], "number"),
            p_value(test["nll_p"]),
        )
        levels = (perplexity(conditions[name]["perplexity"]) for name in LEVELS)
        rows.append((point["domain"], str(point["prefix"]), *levels, *share, *against))
    counts = ", ".join(f"{d['domain']}: {d['rows']} rows of {d['documents']} documents" for d in data["domains"])
    lines = [
        "Perplexity by condition. Mapped \N{MINUS SIGN} source is in nats per token (below zero: the map is better); p "
        "is that of the paired t-test over documents. A gap whose sign is not sure gives its share no interval (hollow "
        f"in the figure). {counts}.",
        "",
    ]
    return [*table(header, rows), *lines]


def changes_table(data: Data) -> list[str]:
    """What each length changes against the reference length; nothing where there is one length only."""
    header = ["Text", "From", "To", "Ceiling", "95 % interval", "p", "Loss against the ceiling", "95 % interval", "p"]
    header += ("Gap recovered", "95 % interval", "p", "Source worse than ceiling by", "p")
    rows = []
    for domain in data["domains"]:
        for length in domain["lengths"]:
            if "change" not in length:
                continue
            cells = [domain["domain"], str(domain["reference"]), str(length["prefix"])]
            for name in ("ceiling", "loss", "gap_recovered"):
                cells += _cells(length["change"][name], share=name == "gap_recovered")
            gap = length["gap"]
            rows.append((*cells, number(gap["difference"], sign=True), p_value(gap["p"])))
    if not rows:
        return []
    lines = ["### What the length changes", "", *table(header, rows)]
    lines += [
        "Second length minus first, on the same scored tokens. Ceiling and loss (mapped minus ceiling) are in nats per "
        "token with paired t-tests over documents, the gap recovered in points, its p by the delta method. A "
        "position-free map loses no more at a longer prefix; one that loses more need not fail at positions, since a "
        "longer prefix also has more mapped tokens to err on. Where the ceiling itself gets worse, or no longer beats "
        "the source, the length tests the target and not the map.",
        "",
    ]
    return lines


def _cells(test: Mapping[str, Any], share: bool) -> tuple[str, str, str]:
    if test["difference"] is None:
        return NOTHING, NOTHING, NOTHING
    ci = (test["ci_low"], test["ci_high"])
    value = points(test["difference"]) if share else number(test["difference"], sign=True)
    return value, interval(ci, "percent" if share else "number"), p_value(test["p"])


def remarks(data: Data) -> list[str]:
    """A sentence on the lengths of every domain, and what was left out and why."""
    lines = []
    for domain in data["domains"]:
        said = length_sentence(domain, by_length(data["points"], domain["domain"]))
        if said:
            lines.append(f"- {domain['domain']}: {said}")
    lines += [f"- {note}" for note in data["notes"]]
    return [*lines, ""] if lines else []
