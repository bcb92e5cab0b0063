"""How long vLLM's own prefill of a target takes: the baseline that a handoff is to beat on a server.

    python benchmarks/vllm_prefill.py --model Qwen/Qwen3-32B --lengths 512 2048 8192 --out vllm_qwen3_32b.json

Prefix caching is off, every prompt is new random token ids (nothing is tokenised), one prompt runs at a time, and a
time ends with the first token, so one decode step (sampling from the prefill's logits) is in it. A figure below what
the card's peak FLOP/s allow is refused: cache hits were timed. ``eval=latency eval.vllm=<the file>`` reads it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.latency.clocks import peak_flops
from kvxfer.evals.latency.costs import spread
from kvxfer.evals.latency.vllm import SCHEMA, floor_seconds, require_above_floor
from kvxfer.files import write_json
from kvxfer.models.geometry import Geometry
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.load import load_config, resolve_device, resolved_revision
from kvxfer.models.machine import machine
from kvxfer.models.spec import ModelSpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or folder of the target")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, help="the card's peak in this dtype; without it, it is measured")
    parser.add_argument("--load-format", default="auto", help="vLLM's; dummy gives random weights")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the card's memory for vLLM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("vllm_prefill.json"))
    return parser.parse_args(arguments)


def start_engine(args: argparse.Namespace, revision: str | None) -> tuple[Callable[[list[int]], None], str]:
    """A function that prefills token ids to the first token, and vLLM's version; ``revision`` is a hub's commit."""
    try:
        import vllm
    except ImportError as error:
        raise KvxferError("vLLM is not installed: pip install vllm, in an environment of its own") from error
    longest = max(args.lengths)
    engine = vllm.LLM(
        model=args.model,
        revision=revision,
        dtype=args.dtype,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        load_format=args.load_format,
        max_model_len=longest + 8,
        max_num_batched_tokens=longest + 8,
        gpu_memory_utilization=args.memory,
        seed=args.seed,
    )
    once = vllm.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)

    def prefill(ids: list[int]) -> None:
        engine.generate([{"prompt_token_ids": ids}], once, use_tqdm=False)

    return prefill, vllm.__version__


def time_lengths(
    prefill: Callable[[list[int]], None], args: argparse.Namespace, geometry: Geometry, peak: float
) -> list[dict[str, Any]]:
    """Median and quartiles of every length, none below its floor.

    Raises:
        KvxferError: a figure that no prefill can have.
    """
    draw = torch.Generator().manual_seed(args.seed)
    points = []
    for length in args.lengths:
        seconds = []
        for _ in range(args.warmup + args.repeats):
            ids = torch.randint(geometry.vocabulary, (length,), generator=draw).tolist()
            started = time.perf_counter()
            prefill(ids)
            seconds.append(time.perf_counter() - started)
        point = {"tokens": length, **spread(seconds[args.warmup :]), "floor": floor_seconds(geometry, length, peak)}
        require_above_floor(point["median"], point["floor"], length, f"vLLM's prefill of {args.model}")
        print(f"{length} tokens: {1e3 * point['median']:.1f} ms (floor {1e3 * point['floor']:.1f} ms)", flush=True)
        points.append(point)
    return points


def measure(args: argparse.Namespace) -> Path:
    """Write the file and return its path."""
    if min(args.lengths) < 2 or args.repeats < 1 or args.warmup < 0:
        raise KvxferError("--lengths must be 2 tokens or more, --repeats 1 or more and --warmup 0 or more")
    if args.peak_tflops is not None and not 0 < args.peak_tflops < math.inf:
        raise KvxferError(f"--peak-tflops={args.peak_tflops} must be above 0 and finite")
    # Now, for the measurement may take an hour.
    if args.out.is_dir() or not os.access(args.out.absolute().parent, os.W_OK):
        raise KvxferError(f"--out={args.out} cannot be written: name a file in a folder that is there")
    spec, device = ModelSpec(args.model, args.revision), resolve_device("auto")
    config, revision = load_config(spec, "--model"), resolved_revision(spec, "--model")
    geometry = read_geometry(config, args.model)
    # Before the engine takes the card's memory.
    peak = peak_flops(device, DTYPES[args.dtype]) if args.peak_tflops is None else 1e12 * args.peak_tflops
    prefill, version = start_engine(args, None if spec.folder is not None else revision)
    write_json(
        args.out,
        {
            "schema": SCHEMA,
            "model": args.model,
            "revision": revision,
            "dtype": args.dtype,
            "device": machine(device)["name"],
            "vllm": version,
            "geometry": geometry.to_dict(),
            "peak_flops": peak,
            "peak_from": "measured" if args.peak_tflops is None else "--peak-tflops",
            "prefix_caching": False,
            "decode_steps": 1,
            "weights": args.load_format,
            "repeats": args.repeats,
            "points": time_lengths(prefill, args, geometry, peak),
        },
    )
    return args.out


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        print(measure(parse(arguments)))
    except KvxferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
