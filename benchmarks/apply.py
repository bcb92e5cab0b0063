"""How fast a map is applied, against the least time that the machine could do the same work in.

    python benchmarks/apply.py pair=toy
    python benchmarks/apply.py pair=geometry pair.layers=4 --hidden 1024 --share

The map has random weights and the form that the overrides give it; its cost is that of a fitted one. ``Mapper.map`` is
timed on random content of one prompt. The roof is the larger of two times: the map's FLOPs at the rate of a large
matrix product in the map's dtype with the same threads, and its bytes (weights, the content read and written) at the
rate of a large copy. Both rates are measured again in every round, next to the map, and fractions are medians over
rounds. The last line is the fraction of the longest prompt: 1 would be as fast as this machine can.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field

import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.latency.clocks import Stopwatch, machine, peak_bandwidth, peak_flops
from kvxfer.evals.latency.costs import Work, map_work
from kvxfer.experiment.config import compose, to_settings
from kvxfer.experiment.settings import TrainSettings
from kvxfer.fitting.random_maps import random_map, with_random_trunks
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.models.hf.load import resolve_device
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair, load_pair, random_pair

_FLOAT32 = 4


@dataclass
class Timed:
    """One prompt length: the work that can't be avoided, and each round's seconds of the map and of the roof."""

    tokens: int
    work: Work
    seconds: list[float] = field(default_factory=list)
    roofs: list[float] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)

    @property
    def fraction(self) -> float:
        """Roof over time, the median of rounds: both of one round met the same machine."""
        return statistics.median(roof / spent for roof, spent in zip(self.roofs, self.seconds, strict=True))

    def row(self) -> str:
        """The table's row."""
        medians = [f"{1e3 * statistics.median(each):.2f} ms" for each in (self.seconds, self.roofs)]
        work = f"{self.work.flops / 1e9:.2f} | {self.work.bytes / 2**20:.1f}"
        return (
            f"| {self.tokens} | {work} | {' | '.join(medians)} | {statistics.mode(self.bounds)} | {self.fraction:.2f} |"
        )


def load(settings: TrainSettings, device: torch.device, args: argparse.Namespace) -> tuple[Pair, CacheMap]:
    """The pair, without weights where the map can do without them, and its random map."""
    reads_target = bool(settings.solver.features.extras)
    spec = settings.pair
    pair = random_pair(spec, str(device) if reads_target else "meta") if spec.random_weights else load_pair(spec)
    cache_map = random_map(pair, settings.solver, {"pair": pair.describe()})
    if args.hidden:
        cache_map = with_random_trunks(cache_map, args.hidden, args.depth, args.share, args.instead)
    return pair, cache_map


def content(pair: Pair, tokens: int, device: torch.device) -> KV:
    """Random content of one prompt."""
    source = pair.source.geometry
    shape = (1, source.kv_heads, tokens, source.head_dim)
    keys, values = ([torch.randn(shape, device=device) for _ in range(source.layers)] for _ in range(2))
    return KV(keys, values, torch.randn(1, tokens, source.hidden, device=device))


def measure(pair: Pair, cache_map: CacheMap, device: torch.device, lengths: list[int], repeats: int) -> list[Timed]:
    """Every length in every round, one after the other, after a round that does not count."""
    mapper, watch = Mapper(cache_map, device, pair=pair), Stopwatch(device)
    found = [Timed(tokens, map_work(cache_map, tokens, 1, _FLOAT32, 1.0, 1.0)) for tokens in sorted(lengths)]
    prompts = {timed.tokens: content(pair, timed.tokens, device) for timed in found}
    ids = torch.randint(pair.target.geometry.vocabulary, (1, max(lengths)), device=device)
    for counted in range(repeats + 1):
        for timed in found:
            rates = peak_flops(device, mapper.dtype), peak_bandwidth(device)
            # The copy has emptied the processor's caches, which the product that sets the roof found filled.
            _, spent = (watch.of(lambda: mapper.map(prompts[timed.tokens], ids[:, : timed.tokens])) for _ in range(2))  # noqa: B023
            if counted:
                roof = timed.work.roof(*rates)
                timed.seconds.append(spent)
                timed.roofs.append(roof["roof"])
                timed.bounds.append(roof["bound"])
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as of train.py: pair=..., solver=..., rank=..., features=...")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048], help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count")
    parser.add_argument("--hidden", type=int, default=0, help="width of random trunks' hidden layers; 0: no trunks")
    parser.add_argument("--depth", type=int, default=1, help="hidden layers of a trunk")
    parser.add_argument("--share", action="store_true", help="outputs that read the same columns share a trunk")
    parser.add_argument("--instead", action="store_true", help="trunks in place of the linear parts")
    args = parser.parse_intermixed_args(arguments)
    if min(*args.lengths, args.repeats, args.depth) < 1 or args.hidden < 0:
        parser.error("--lengths, --repeats and --depth are 1 or more, --hidden 0 or more")
    if args.share | args.instead and not args.hidden:
        parser.error("--share and --instead are of trunks: give --hidden too")
    try:
        settings = to_settings("train", compose("train", args.overrides))
        device = resolve_device(settings.pair.device)
        pair, cache_map = load(settings, device, args)
    except KvxferError as error:
        parser.error(str(error))
    about = machine(device)
    print(
        f"{settings.pair.label}: {cache_map.form}, {cache_map.parameters / 1e6:.2f} M parameters, "
        f"{cache_map.flops_per_token / 1e6:.2f} MFLOP a token, float32, {', '.join(map(str, about.values()))}"
        f"{'' if device.type == 'cuda' else ' threads'}\n"
    )
    found = measure(pair, cache_map, device, args.lengths, args.repeats)
    print("| prompt | GFLOP | MiB | map | roof | bound | fraction |\n| --: | --: | --: | --: | --: | :-- | --: |")
    print("\n".join(timed.row() for timed in found))
    print(f"\nroof fraction: {found[-1].fraction:.2f}")


if __name__ == "__main__":
    main()
