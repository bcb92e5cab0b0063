"""What every evaluation records of the map and the text that it is about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvxfer.experiment.loggers import RunLogger, open_loggers
from kvxfer.experiment.runs import Run
from kvxfer.experiment.settings import EvaluateSettings, dials, label
from kvxfer.maps.artifact import CacheMap
from kvxfer.models.pair import Pair


def columns(settings: EvaluateSettings, cache_map: CacheMap) -> dict[str, Any]:
    """Flat columns from the map's own manifest: with ``map=`` it need not be the config's."""
    m = cache_map.manifest
    names = {key: m[key]["name"] for key in ("solver", "penalty", "rank", "features")}
    about = {"plan": settings.plan.name, "corpus": settings.corpus.name, "eval": settings.eval.name}
    return {"pair": settings.pair.label, **names, **dials(m), **about}


@contextmanager
def evaluation_loggers(
    settings: EvaluateSettings, run: Run, cache_map: CacheMap, inputs: dict[str, str]
) -> Iterator[RunLogger]:
    """The loggers of an evaluation's run, named by its map; ``inputs`` are the ids that they show."""
    about = columns(settings, cache_map)
    name, tags = label(about)
    logged = {**about, "config": run.record["config"], "inputs": inputs}
    group = settings.logger.group or settings.pair.label
    with open_loggers(settings.logger, run.work, run.id, "evaluate", name, logged, group, tags) as out:
        yield out


def describe_map(cache_map: CacheMap, directory: Path, pair: Pair, prompt: int) -> dict[str, Any]:
    """A map's settings and its cost; ``prompt`` is how long the prefill is that its cost is compared with."""
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
        "parameters": cache_map.parameters,
        "bytes": cache_map.bytes,
        "flops_per_token": cache_map.flops_per_token,
        "bytes_read_per_token": cache_map.bytes_read_per_token,
        "bytes_written_per_token": cache_map.bytes_written_per_token,
        "share_of_prefill_flops": cache_map.flops_per_token / pair.target.geometry.prefill_flops(prompt),
    }
