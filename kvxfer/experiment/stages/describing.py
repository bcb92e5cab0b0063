"""What is recorded and logged of a map, whatever made it and whoever asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvxfer.errors import file_error
from kvxfer.experiment.loggers import RunLogger
from kvxfer.experiment.settings import EvaluateSettings, dials
from kvxfer.files import read_json
from kvxfer.handoff.cost import handoff_share
from kvxfer.maps.artifact import EVIDENCE, MANIFEST, TENSORS, CacheMap
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from kvxfer.report.kinds import REPORTS

log = logging.getLogger("kvxfer")

EVIDENCE_FILE = "evidence.json"
"""What an evaluation says of its map, in its own directory; a copy lies beside the map wherever that can be written."""
COSTS = ("parameters", "flops_per_token", "bytes_read_per_token", "bytes_written_per_token")


def columns(settings: EvaluateSettings, cache_map: CacheMap) -> dict[str, Any]:
    """Flat columns from the map's own manifest: with ``map=`` it need not be the config's."""
    about = {"plan": settings.plan.name, "corpus": settings.corpus.name, "eval": settings.eval.name}
    return {"pair": settings.pair.label, **dials(cache_map.manifest), **about}


def describe_map(cache_map: CacheMap, directory: Path, pair: Pair, plan: Plan, prompt: int) -> dict[str, Any]:
    """A map's settings and its cost; ``prompt`` is how long the prefill is that its cost is compared with.

    ``share_of_prefill_flops`` is the map's own, for each token that it maps; ``handoff_share_of_prefill_flops`` the
    whole handoff's under the plan.
    """
    m = cache_map.manifest
    timed, whole = pair.target.geometry.layers, pair.target.whole.layers
    return {
        **({"random": True} if m.get("random") else {}),
        **({} if timed == whole else {"slice": f"{timed} of {whole}"}),
        "run_id": directory.name,
        "sha256": cache_map.hash,
        **{key: m[key]["name"] for key in ("solver", "penalty", "rank", "features")},
        "lam": m["penalty"]["lam"],
        # With method=all none was asked for: how many there are.
        "k": m["chosen"]["k"][0] if m["solver"]["k"] is None else m["solver"]["k"],
        **({"trained_on": m["base"]["run"], "trainer_seed": m["trainer"]["seed"]} if "trainer" in m else {}),
        **{cost: getattr(cache_map, cost) for cost in ("bytes", *COSTS)},
        "share_of_prefill_flops": cache_map.flops_per_token / pair.target.geometry.prefill_flops(prompt),
        "handoff_share_of_prefill_flops": handoff_share(cache_map, pair.target.geometry, plan, prompt),
    }


def logged_metrics(results: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of results.json as they are logged, by name."""
    report = REPORTS[results["kind"]]
    return {f"{report.logged}/{key}": value for key, value in report.metrics(results["data"]).items()}


def keep_evidence(cache_map: CacheMap, directory: Path, run: Path) -> None:
    """Put a finished evaluation's evidence beside its map, if it is not there. A record, and never a failure."""
    if not (run / EVIDENCE_FILE).is_file() or (directory / EVIDENCE / f"{run.name}.json").is_file():
        return
    try:
        cache_map.add_evidence(directory, run.name, read_json(run / EVIDENCE_FILE))
    except OSError as error:
        log.warning(
            "nothing is kept beside the map (%s); what was found of it lies in %s",
            file_error(error),
            run / EVIDENCE_FILE,
        )


def log_map(
    out: RunLogger, work: Path, cache_map: CacheMap, layers: Sequence[Mapping[str, Any]], found: dict[str, Any]
) -> None:
    """Log a new map with its costs, what was ``found`` of it, and a record for each of its layers and kinds."""
    out.metrics({**{f"fit/{cost}": getattr(cache_map, cost) for cost in COSTS}, **found})
    names = list(layers[0])
    out.table("per_layer", names, [[record[name] for name in names] for record in layers])
    out.artifact(
        f"map-{cache_map.manifest['run_id']}", "kv-map", [work / MANIFEST, work / TENSORS], {"map": cache_map.hash}
    )
