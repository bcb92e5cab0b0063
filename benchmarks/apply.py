"""How fast a map is applied, from the source's cache to the target's, against the least time for the same work here.

    python benchmarks/apply.py pair=toy
    python benchmarks/apply.py pair=geometry pair.source=qwen3-1.7b pair.target=qwen3-4b pair.layers=4 solver.k=4
    python benchmarks/apply.py pair=geometry pair.layers=4 --hidden 1024 --share

The map has random weights and the form that the overrides give it; its cost is that of a fitted one. ``Transfer.write``
is timed from a random cache of one prompt into a cache that is there, as an engine has it, in the map's dtype
(``map_dtype``: bfloat16 where the device is fast in it, unless it is given).
Beside it stands the straightforward loop over target layers (gather, multiply, rotate, clone), in the same dtype from
end to end and in float32, and with ``--against`` another checkout of this project.

The roof is the larger of two times: the map's FLOPs at the best rate of a matrix product in the map's dtype (several
sizes, each of torch's ways), and its bytes (weights in that dtype, the source's cache read, the target's written) at
the rate of a large copy. Both rates are measured again in every round, next to the map; fractions and ratios are
medians over rounds. The last line is the fraction of the longest prompt: 1 would be as fast as this machine can.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from other_tree import modules_of
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.latency.clocks import Stopwatch, peak_bandwidth, peak_flops
from kvxfer.evals.latency.costs import Work, map_work
from kvxfer.experiment.config import compose, to_settings
from kvxfer.experiment.settings import EvaluateSettings
from kvxfer.fitting.random_maps import random_map
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps import apply, views
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import Output
from kvxfer.maps.columns import TargetTokens, block_columns
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.plan import Plan
from kvxfer.maps.products import resolve_dtype
from kvxfer.maps.trunks import Trunk
from kvxfer.models.hf.load import resolve_device
from kvxfer.models.kv import KV
from kvxfer.models.machine import machine
from kvxfer.models.pair import Pair, load_pair, random_pair

Way = Callable[[KV, Tensor], object]
"""From a source's cache and its tokens to the target's."""

OURS, LOOP, FLOAT32, BEFORE = "kvxfer", "loop", "float32 loop", "before"


@dataclass
class Timed:
    """One prompt length: the work that can't be avoided, and each round's seconds of every way and of the roof."""

    tokens: int
    work: Work
    seconds: dict[str, list[float]]
    roofs: list[float] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)

    @property
    def fraction(self) -> float:
        """Roof over time, the median of rounds: both of one round met the same machine."""
        return statistics.median(roof / spent for roof, spent in zip(self.roofs, self.seconds[OURS], strict=True))

    def times(self, way: str) -> float:
        """How many times as long another way takes, likewise."""
        rounds = zip(self.seconds[way], self.seconds[OURS], strict=True)
        return statistics.median(theirs / ours for theirs, ours in rounds)

    def row(self) -> str:
        """The table's row."""
        spent = (statistics.median(each) for each in (self.seconds[OURS], self.roofs))
        cells = [
            f"{self.work.flops / 1e9:.2f}",
            f"{self.work.bytes / 2**20:.1f}",
            *(f"{1e3 * t:.2f} ms" for t in spent),
        ]
        cells += [statistics.mode(self.bounds), f"{self.fraction:.2f}"]
        cells += [f"{self.times(way):.1f}" for way in self.seconds if way != OURS]
        return f"| {self.tokens} | {' | '.join(cells)} |"


def with_random_trunks(cache_map: CacheMap, hidden: int, depth: int, share: bool, instead: bool) -> CacheMap:
    """The map with random trunks over the columns that its outputs read.

    Args:
        hidden, depth: the width and number of the hidden layers, which are followed by a ReLU.
        share: outputs that read the same columns share a trunk; otherwise each has one of its own.
        instead: the outputs' linear parts are left out.
    """
    generator = torch.Generator().manual_seed(1)

    def drawn(inputs: int, columns: int) -> torch.Tensor:
        return torch.randn(inputs, columns, generator=generator) / inputs**0.5

    readers: dict[Any, list[Output]] = {}
    for output, layer in cache_map.layers.items():
        readers.setdefault(layer.blocks if share else output, []).append(output)
    trunks = []
    for outputs in readers.values():
        layer = cache_map.layers[outputs[0]]
        widths = [layer.weight.shape[0] * layer.weight.shape[1]] + [hidden] * depth
        weights = tuple(drawn(a, b) for a, b in itertools.pairwise(widths))
        readouts = {output: drawn(hidden, cache_map.width) for output in outputs}
        trunks.append(Trunk(layer.blocks, weights, tuple(torch.zeros(hidden) for _ in weights), "relu", readouts))
    layers = cache_map.layers
    if instead:
        nothing = torch.zeros(1, 0, cache_map.width)
        layers = {output: LinearLayer((), nothing, layer.bias) for output, layer in layers.items()}
    return CacheMap(layers, cache_map.manifest, cache_map.random, tuple(trunks))


def load(settings: EvaluateSettings, device: torch.device, args: argparse.Namespace) -> tuple[Pair, CacheMap]:
    """The pair and its random map."""
    spec = settings.pair
    pair = random_pair(spec, str(device)) if spec.random_weights else load_pair(spec)
    cache_map = random_map(pair, settings.solver, {"pair": pair.describe()})
    if args.hidden:
        cache_map = with_random_trunks(cache_map, args.hidden, args.depth, args.share, args.instead)
    return pair, cache_map


def turned(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys turned in their own dtype, as a model's code does."""
    width = cos.shape[-1]
    low, high = keys[..., :width].chunk(2, dim=-1)
    return torch.cat([keys[..., :width] * cos + torch.cat([-high, low], -1) * sin, keys[..., width:]], -1)


def loop(pair: Pair, cache_map: CacheMap, dtype: torch.dtype, device: torch.device) -> Way:
    """The straightforward way: strip all, then layer by layer gather, multiply, rotate and clone, in one dtype."""

    def moved(x: Tensor) -> Tensor:
        return x.to(device, dtype)

    layers = {
        output: LinearLayer(
            part.blocks, moved(part.weight), moved(part.bias), None if part.right is None else moved(part.right)
        )
        for output, part in cache_map.layers.items()
    }
    random = None if cache_map.random is None else cache_map.random.to(device, dtype)
    trunks = [(trunk, {output: moved(w) for output, w in trunk.readouts.items()}) for trunk in cache_map.trunks]

    def angles(model: Any, tokens: int) -> tuple[Tensor, Tensor]:
        cos, sin = model.cos_sin(tokens)
        return moved(cos), moved(sin)

    @torch.inference_mode()
    def run(cache: KV, ids: Tensor) -> KV:
        cos, sin = angles(pair.source, cache.tokens)
        hidden = None if cache.hidden is None else moved(cache.hidden)
        content = KV([turned(moved(k), cos, -sin) for k in cache.keys], [moved(v) for v in cache.values], hidden)
        known = TargetTokens.of(pair, ids, cache_map.extras) if cache_map.extras else TargetTokens(None, None)
        cos, sin = angles(pair.target, cache.tokens)
        made: dict[str, list[Tensor]] = {"keys": [], "values": []}
        for (layer, kind), part in sorted(layers.items()):

            def design(blocks: Any) -> Tensor:
                return torch.cat([moved(block_columns(content, known, random, block)) for block in blocks], -1)

            y = part.bias.expand(1, cache.tokens, -1)
            if part.blocks:
                x = design(part.blocks).unflatten(-1, (len(part.blocks), part.groups, -1)) if part.groups > 1 else None
                parts = [design(part.blocks)] if x is None else list(x.transpose(2, 3).flatten(3).unbind(2))
                found = [each @ w for each, w in zip(parts, part.weight, strict=True)]
                if part.right is not None:
                    found = [each @ w for each, w in zip(found, part.right, strict=True)]
                y = torch.cat(found, -1) + part.bias
            for trunk, readouts in trunks:
                if (layer, kind) in readouts:
                    y = y + trunk.hidden(design(trunk.blocks)) @ readouts[layer, kind]
            heads = y.unflatten(-1, (pair.target.geometry.kv_heads, -1)).transpose(1, 2)
            heads = turned(heads, cos, sin) if kind == "keys" else heads
            made[kind].append(heads.to(pair.target.dtype).clone(memory_format=torch.contiguous_format))
        return KV(made["keys"], made["values"])

    return run


def into_a_cache(transfer: Transfer, longest: int) -> Way:
    """The way that is served, into one cache again and again."""
    geometry, target = transfer.pair.target.geometry, transfer.pair.target
    shape = (1, geometry.kv_heads, longest, geometry.head_dim)
    keys, values = (
        [torch.zeros(shape, dtype=target.dtype, device=target.device) for _ in range(geometry.layers)] for _ in range(2)
    )
    into = KV(keys, values)

    def run(cache: KV, ids: Tensor) -> KV:
        written = into.span(0, cache.tokens)
        transfer.write(cache, ids, written)
        return written

    return run


def another(tree: Path, pair: Pair, cache_map: CacheMap, device: torch.device) -> Way:
    """The way of another checkout, in the dtype in which it maps by itself."""
    handoff, theirs = modules_of(tree, "kvxfer.handoff.transfer", "kvxfer.maps.apply")
    transfer = handoff.Transfer(pair, theirs.Mapper(cache_map, device, pair=pair), Plan())
    return lambda cache, ids: transfer.span(cache, ids)


def cache_of(pair: Pair, tokens: int, device: torch.device) -> KV:
    """A random cache of one prompt."""
    source, dtype = pair.source.geometry, pair.source.dtype
    shape = (1, source.kv_heads, tokens, source.head_dim)
    keys, values = ([torch.randn(shape, device=device).to(dtype) for _ in range(source.layers)] for _ in range(2))
    return KV(keys, values, torch.randn(1, tokens, source.hidden, device=device).to(dtype))


def measure(pair: Pair, mapper: Mapper, cache_map: CacheMap, ways: dict[str, Way], args: Any) -> list[Timed]:
    """Every length and way in every round, one after the other, after a round that does not count."""
    device, width = mapper.like.device, pair.source.dtype.itemsize
    watch, found = Stopwatch(device), []
    for tokens in sorted(args.lengths):
        work = map_work(cache_map, tokens, 1, width, mapper.dtype.itemsize, 1.0, 1.0)
        found.append(Timed(tokens, work, {name: [] for name in ways}))
    prompts = {timed.tokens: cache_of(pair, timed.tokens, device) for timed in found}
    ids = torch.randint(pair.target.geometry.vocabulary, (1, max(args.lengths)), device=device)
    for counted in range(args.repeats + 1):
        for timed in found:
            rates = peak_flops(device, mapper.dtype, (1024, 2048, 4096)), peak_bandwidth(device)
            for name, way in ways.items():
                # The copy has emptied the processor's caches, which the product that sets the roof found filled.
                _, spent = (watch.of(lambda: way(prompts[timed.tokens], ids[:, : timed.tokens])) for _ in range(2))  # noqa: B023
                if counted:
                    timed.seconds[name].append(spent)
            if counted:
                roof = timed.work.roof(*rates)
                timed.roofs.append(roof["roof"])
                timed.bounds.append(roof["bound"])
    return found


@contextmanager
def parts_of(device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds of the parts of what is mapped meanwhile: reading and stripping, products, rotating and writing."""
    spent = {"read and strip": 0.0, "products": 0.0, "rotate and write": 0.0}
    watch = Stopwatch(device)
    places = [
        (views.Views, "copy", "read and strip"),
        (apply._Product, "run", "products"),
        (views.Views, "put", "rotate and write"),
    ]

    def watched(inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            found: list[Any] = []
            spent[part] += watch.of(lambda: found.append(inner(*given)))
            return found[0]

        return run

    before = [getattr(owner, name) for owner, name, _ in places]
    try:
        for inner, (owner, name, part) in zip(before, places, strict=True):
            setattr(owner, name, watched(inner, part))
        yield spent
    finally:
        for inner, (owner, name, _) in zip(before, places, strict=True):
            setattr(owner, name, inner)


def shares(ours: Way, pair: Pair, tokens: int, device: torch.device) -> str:
    """Where the time of one call goes, in words."""
    cache, ids = cache_of(pair, tokens, device), torch.zeros(1, tokens, dtype=torch.int64, device=device)
    watch = Stopwatch(device)
    ours(cache, ids)
    with parts_of(device) as spent:
        whole = watch.of(lambda: ours(cache, ids))
    spent["rest"] = whole - sum(spent.values())
    return f"{tokens} tokens: " + ", ".join(f"{part} {seconds / whole:.0%}" for part, seconds in spent.items())


def parser() -> argparse.ArgumentParser:
    """What may be asked."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("overrides", nargs="*", help="as of evaluate.py: pair=..., solver=..., rank=..., map_dtype=...")
    made.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048], help="tokens of a prompt")
    made.add_argument("--repeats", type=int, default=7, help="rounds that count")
    made.add_argument("--hidden", type=int, default=0, help="width of random trunks' hidden layers; 0: no trunks")
    made.add_argument("--depth", type=int, default=1, help="hidden layers of a trunk")
    made.add_argument("--share", action="store_true", help="outputs that read the same columns share a trunk")
    made.add_argument("--instead", action="store_true", help="trunks in place of the linear parts")
    made.add_argument("--against", type=Path, help="another checkout of this project, timed in turns")
    return made


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    args = (asked := parser()).parse_intermixed_args(arguments)
    if min(*args.lengths, args.repeats, args.depth) < 1 or args.hidden < 0:
        asked.error("--lengths, --repeats and --depth are 1 or more, --hidden 0 or more")
    if args.share | args.instead and not args.hidden:
        asked.error("--share and --instead are of trunks: give --hidden too")
    try:
        settings = to_settings("evaluate", compose("evaluate", args.overrides))
        device = resolve_device(settings.pair.device)
        pair, cache_map = load(settings, device, args)
        dtype = resolve_dtype(settings.map_dtype, device, pair.source.dtype)
    except KvxferError as error:
        asked.error(str(error))
    mapper = Mapper(cache_map, device, dtype, pair)
    transfer = Transfer(pair, mapper, Plan())
    ways: dict[str, Way] = {OURS: into_a_cache(transfer, max(args.lengths)), LOOP: loop(pair, cache_map, dtype, device)}
    if dtype != torch.float32:
        ways[FLOAT32] = loop(pair, cache_map, torch.float32, device)
    if args.against is not None:
        ways[BEFORE] = another(args.against, pair, cache_map, device)
    about = machine(device)
    print(
        f"{settings.pair.label}: {cache_map.form}, {cache_map.parameters / 1e6:.2f} M parameters, "
        f"{cache_map.flops_per_token / 1e6:.2f} MFLOP a token, map {dtype}, caches {pair.target.dtype}, "
        f"{', '.join(map(str, about.values()))}{'' if device.type == 'cuda' else ' threads'}\n".replace("torch.", "")
    )
    found = measure(pair, mapper, cache_map, ways, args)
    others = [f"{name} / kvxfer" for name in ways if name != OURS]
    print(f"| prompt | GFLOP | MiB | kvxfer | roof | bound | fraction | {' | '.join(others)} |")
    print("| --: | --: | --: | --: | --: | :-- | --: |" + " --: |" * len(others))
    print("\n".join(timed.row() for timed in found))
    print(f"\n{shares(ways[OURS], pair, found[-1].tokens, device)}")
    print(f"\nroof fraction: {found[-1].fraction:.2f}")


if __name__ == "__main__":
    main()
