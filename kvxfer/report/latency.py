"""What ``eval=latency`` tells a reader, from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.evals.evaluation import Data
from kvxfer.handoff.transfer import STEPS
from kvxfer.report.latency_verdict import slices
from kvxfer.report.markdown import table
from kvxfer.report.tables import NOTHING, number, percent, quantity

Point = Mapping[str, Any]

NAMES = {
    "export": "Export",
    "strip": "Strip",
    "map": "Map",
    "restore": "Restore",
    "exact": "Exact first tokens",
    "inject": "Inject",
    "held_back": "Held-back prefill",
    "first_decode": "First decode",
}
MEANINGS = (
    ("Export", "the source's cache is read out, as references (with `eval.bandwidth` it also travels)"),
    ("Strip", "keys are brought to content space, all in float32"),
    ("Map", "the map's matrix products"),
    ("Restore", "the target's rotation is put on, and the model's dtype"),
    ("Exact first tokens", "the target's own prefill of the tokens that the plan does not map"),
    ("Inject", "exact and mapped tokens become the target's own cache, which is a copy"),
    ("Held-back prefill", "the held-back tokens but the last; none with a hold-back of one"),
    ("First decode", "the target reads the last prompt token and gives its first one"),
)
WAYS = {
    "warm": "the source has run and the map is in memory",
    "loaded": "the source has run and the map is loaded from disk and verified first",
    "cold": "the source has to run as well (both prefills are counted), the map is in memory",
}


def milliseconds(seconds: float | None, sign: bool = False) -> str:
    """Three significant digits, in milliseconds without the unit."""
    if seconds is None:
        return NOTHING
    value = 1e3 * seconds
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return number(value, decimals, sign)


def latency_sections(data: Data) -> list[str]:
    """Markdown of everything."""
    return [
        *_introduction(data),
        *_times(data),
        *_break_even(data),
        "![Every part of the handoff, as a share of the target's own prefill](figures/latency_parts.png)",
        "",
        *_parts(data),
        *_formula(data),
        *_roofs(data),
    ]


def _introduction(data: Data) -> list[str]:
    m, s = data["machine"], data["settings"]
    threads = f", {m['threads']} threads" if "threads" in m else ""
    lines = [
        f"{s['repeats']} rounds after {s['warmup']} warm-ups, of random tokens. A round is the source's prefill, the "
        "handoff and the target's own prefill, one after the other in one process; the handoff is the code that every "
        "evaluation uses. Times end with the target's first token (the source's with its cache) and are medians.",
        "",
        f"Machine: {m['name']} ({m['device']}{threads}); models in {m['dtype']} with {m['attention']} attention, the "
        f"map in {m['map_dtype']}.",
        "",
    ]
    if data["scaled"]:
        lines += [
            f"**Scaled**: timed were {slices(data)}; what grows with depth is multiplied up to all of them (the "
            "rotation's angles, embedding, final norm and vocabulary projection were timed alone and count once).",
            "",
        ]
    if data["random"]:
        lines += ["**Random weights**: models and map have the published shapes and mean nothing.", ""]
    return lines


def _times(data: Data) -> list[str]:
    header = ("Tokens", "Batch", "Target prefill", "Handoff", "Saved (95 %)", "Warm", "+ map load", "Source prefill")
    rows = []
    for point in data["points"]:
        warm = point["warm"]
        ci = "" if warm["ci"] is None else f" [{', '.join(milliseconds(value) for value in warm['ci'])}]"
        outside = point["vllm"]
        rows.append(
            (
                str(point["length"]),
                str(point["batch"]),
                milliseconds(point["target"]["median"]),
                milliseconds(point["handoff"]["median"]),
                f"{milliseconds(warm['saving'], sign=True)}{ci}",
                _times_as_fast(warm["ratio"]),
                _times_as_fast(point["loaded"]["ratio"]),
                milliseconds(point["source"]["median"]),
                _times_as_fast(point["cold"]["ratio"]),
                milliseconds(outside),
                NOTHING if outside is None else _times_as_fast(outside / point["handoff"]["median"]),
            )
        )
    lines = ["### To the target's first token (ms)", ""]
    lines += table((*header, "Cold", "vLLM prefill", "against vLLM"), rows)
    lines += [f"- {name.capitalize()}: {text}." for name, text in WAYS.items() if name != "loaded"]
    load = data["load"]
    lines += [
        f"- Map load: {milliseconds(load['median'])} ms for {quantity(load['bytes'], 'B')}, from disk where the system "
        "lets go of the file, with its SHA-256 verified. Loaded before one handoff here; the formula below shares it.",
        "- Ratios above 1 mean that the handoff is faster. Intervals are of the median over paired rounds.",
    ]
    if any(point["vllm"] is not None for point in data["points"]):
        lines.append(
            "- vLLM's figure was measured apart, with prefix caching off, and also ends with the first token; a "
            "handoff into vLLM has costs of its own that are not in it."
        )
    return [*lines, ""]


def _times_as_fast(ratio: float) -> str:
    return f"{number(ratio, 2)}×"


def _break_even(data: Data) -> list[str]:
    lines = ["### From which length it pays", ""]
    for row in data["break_even"]:
        for way, text in WAYS.items():
            length, end = row[way], row["up_to"]
            shortest = min(point["length"] for point in data["points"])
            said = f"none up to {end} tokens"
            if length is not None:
                said = f"{length:.0f} tokens" if length > shortest else f"{shortest} tokens or fewer"
            batch = f", batches of {row['batch']}" if len(data["break_even"]) > 1 else ""
            lines.append(f"- {said}, where {text}{batch}")
    return [
        *lines,
        "",
        "By medians, interpolated between the lengths measured; every longer one measured saves time.",
        "",
    ]


def _parts(data: Data) -> list[str]:
    used = [step for step in STEPS if any(point["parts"][step]["median"] > 1e-6 for point in data["points"])]
    rows = [
        (str(point["length"]), str(point["batch"]), *(_with_quartiles(point["parts"][step]) for step in used))
        for point in data["points"]
    ]
    lines = ["### The parts (ms)", "", *table(("Tokens", "Batch", *(NAMES[step] for step in used)), rows)]
    lines += [f"- {name}: {text}." for name, text in MEANINGS]
    checks = [point for point in data["points"] if point["whole"] is not None]
    if checks:
        most = max(checks, key=lambda point: abs(point["whole"]["median"] / point["handoff"]["median"] - 1))
        share = most["whole"]["median"] / most["handoff"]["median"]
        lines.append(
            f"- Without a clock between the parts the whole took {percent(share)} of their sum where it differs most "
            f"({most['length']} tokens)."
        )
    return [*lines, "", "Medians, with quartiles in brackets.", ""]


def _with_quartiles(part: Mapping[str, float]) -> str:
    return f"{milliseconds(part['median'])} [{milliseconds(part['low'])}, {milliseconds(part['high'])}]"


def _formula(data: Data) -> list[str]:
    s = data["settings"]
    columns = ("prefill", "mapping", "transport", "delivery", "own", "load", "fallback", "saving", "per_accepted")
    header = (
        "Tokens",
        "Batch",
        "Accepted",
        "Target prefill",
        "− mapping",
        "− transport",
        "− delivery",
        "− own tokens",
        "− load",
        "− fallback",
        "= saving",
        "Per accepted",
    )
    rows = [
        (
            str(point["length"]),
            str(point["batch"]),
            f"{100 * row['acceptance']:.0f} %",
            *(milliseconds(row[column]) for column in columns),
        )
        for point in data["points"]
        for row in point["savings"]
    ]
    rate = "one device" if s["bandwidth"] is None else f"{s['bandwidth']:g} GB/s"
    fit = data["fit_seconds"]
    shared = f"{quantity(data['load']['bytes'] / s['handoffs_per_fit'], 'B')} of the stored map"
    fitting = "the fit's seconds are unknown and left out"
    if fit is not None:
        fitting = f"{number(fit, 0)} s of calibration and fit over {s['handoffs_per_fit']:,} accepted handoffs"
    return [
        "### What a handoff saves (ms a handoff)",
        "",
        "saving = target prefill − mapping − transport − delivery − own tokens − amortised load − expected "
        "fallback. "
        "Terms are the parts' medians; times of a batch are shared by its prompts.",
        "",
        *table(header, rows),
        "- Mapping: strip, map, restore. Transport: export and the source's cache on its way "
        f"({rate}). Delivery: inject. Own tokens: what the target reads itself, to its first token.",
        f"- Load: once for {s['handoffs']:,} handoffs. Fallback: a rejected handoff costs the target's prefill besides "
        "all of itself.",
        f"- Per accepted: also its share of rejected handoffs, of shadow runs ({percent(s['shadow_rate'])} of requests "
        f"map only to compare, and save nothing) and of the fit: {fitting}. It also carries {shared}.",
        "",
    ]


def _roofs(data: Data) -> list[str]:
    m = data["machine"]
    names = {"map": "Mapping", "target": "Target prefill", "source": "Source prefill"}
    rows = [
        (
            str(point["length"]),
            str(point["batch"]),
            names[name],
            quantity(roof["flops"]),
            quantity(roof["bytes"], "B"),
            milliseconds(roof["roof"]),
            roof["bound"],
            milliseconds(roof["measured"]),
            percent(roof["fraction"]),
        )
        for point in data["points"]
        for name, roof in point["roofs"].items()
    ]
    header = ("Tokens", "Batch", "What", "FLOPs", "Bytes", "Roof (ms)", "Bound by", "Measured (ms)", "Of the roof")
    peak, own_peak = (quantity(m[key], "FLOP/s") for key in ("peak_flops", "map_peak_flops"))
    last = data["points"][-1]["roofs"]
    ceiling = last["target"]["flops"] / last["map"]["flops"]
    lines = [
        "### How near to what the machine can do",
        "",
        f"Peaks measured in this process: {peak} in {m['dtype']} (a large matrix product), "
        f"{quantity(m['bandwidth'], 'B/s')} (a large copy). The roof is the least time that FLOPs or bytes allow.",
        "",
        *table(header, rows),
        f"By FLOPs alone the target's prefill is {number(ceiling, 1)} times the map at the longest prompt: no "
        "implementation saves more.",
    ]
    if m["map_dtype"] != m["dtype"]:
        own = percent(last["map"]["fraction_of_own"])
        lines.append(
            f"The map multiplies in {m['map_dtype']}, whose own peak here is {own_peak}: of that roof it "
            f"reaches {own} at the longest prompt."
        )
    if data["machine"]["device"] == "cpu":
        lines.append("On a CPU small weights stay in its cache, so a fraction may exceed 100 % of a roof by bandwidth.")
    return [*lines, ""]
