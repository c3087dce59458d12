"""What the same bits cost: canonical order, a float64 accumulator and exact sums, against a plain sum; prints JSON.

    python benchmarks/determinism.py [--mib 1] [--leaves 8] [--rounds 30] [--world 3] [--network-mib 8]

In memory, for each dtype, --leaves leaves of --mib MiB each:

    plain      left to right into one accumulator, numpy's own addition, none of our promises: no fixed NaN, no check
               of the thread's mode. 16-bit types, which numpy adds 30 times slower or not at all, are widened to
               float32 by our conversion and rounded once at the end
    canonical  reduce_tree over the canonical tree, finished: what a collective does
    float64    the same with precision="float64"
    exact      the same with precision="exact"; exact avg divides as well
    partials   two exact accumulators are made of half of the leaves each, then combined and finished: what is paid
               when ranks hold several leaves and send partial sums

Over the network (real sockets on loopback, --world ranks in this process, float32, --network-mib MiB, one leaf for each
rank): all_reduce in canonical order against reduce_order="ring", with either precision, exact, and compressed.

In every round each variant runs once, the order turning from round to round; a ratio is taken against the round's own
plain sum (or ring), so that what disturbs the machine disturbs both. Given are the median of the ratios, their
quartiles, and the least time of the plain variant.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quicoll.numerics.canonical_order import split
from quicoll.numerics.dtypes import DTYPES, FLOAT32, FLOAT64, Array, DType, narrow, widen
from quicoll.numerics.reduce import Precision, ReduceOp, accumulator, reduce_tree
from quicoll.testing import cluster


@dataclass(frozen=True)
class Leaf:
    values: Array
    wide: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=float, default=1.0, help="MiB of a leaf")
    parser.add_argument("--leaves", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--world", type=int, default=3, help="ranks of the network part; 0 leaves it out")
    parser.add_argument("--network-mib", type=float, default=8.0, help="MiB of a tensor over the network")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16", "float32", "float64"])
    options = parser.parse_args()
    report: dict[str, Any] = {
        "machine": f"{platform.platform()}, Python {platform.python_version()}, numpy {np.__version__}",
        "leaf_mib": options.mib,
        "leaves": options.leaves,
        "rounds": options.rounds,
        "memory": {
            name: in_memory(DTYPES[name], int(options.mib * (1 << 20)), options.leaves, options.rounds)
            for name in options.dtypes
        },
    }
    if options.world:
        report["world"], report["network_mib"] = options.world, options.network_mib
        report["network"] = asyncio.run(
            over_network(options.world, int(options.network_mib * (1 << 20)), options.rounds)
        )
    json.dump(report, sys.stdout, indent=2)
    print()


# ---------------------------------------------------------------------------------------------------------------------
# In memory


def in_memory(dtype: DType, nbytes: int, leaves: int, rounds: int) -> dict[str, Any]:
    size = nbytes // dtype.itemsize
    operands = [Leaf(drawn(dtype, size, seed)) for seed in range(leaves)]
    out = np.empty(size, dtype.storage)

    def tree(precision: Precision, op: ReduceOp = ReduceOp.SUM) -> Callable[[], None]:
        ordered = canonical(operands)
        return lambda: reduce_tree(
            ordered, values_of,
            op=op, dtype=dtype, acc=accumulator(dtype, op, precision), out=out, final=True, leaves=leaves,
        )  # fmt: skip

    variants = {
        "plain": plain(dtype, operands, out),
        "canonical": tree("default"),
        "float64": tree("float64"),
        "exact": tree("exact"),
        "exact avg": tree("exact", ReduceOp.AVG),
        "partials": partials(dtype, operands, out),
    }

    def timed() -> dict[str, float]:
        return {name: seconds(variants[name]) for name in turned(list(variants))}

    for call in variants.values():
        call()
    return summary([timed() for _ in range(rounds)], "plain", elements=size * leaves)


def plain(dtype: DType, operands: list[Leaf], out: Array) -> Callable[[], None]:
    if dtype.itemsize > 2:

        def add() -> None:
            np.copyto(out, operands[0].values)
            for leaf in operands[1:]:
                np.add(out, leaf.values, out=out)

        return add
    total, wide = np.empty(out.size, np.float32), np.empty(out.size, np.float32)

    def add_narrow() -> None:
        widen(operands[0].values, dtype, FLOAT32, total)
        for leaf in operands[1:]:
            widen(leaf.values, dtype, FLOAT32, wide)
            np.add(total, wide, out=total)
        narrow(total, FLOAT32, dtype, out)

    return add_narrow


def partials(dtype: DType, operands: list[Leaf], out: Array) -> Callable[[], None]:
    acc = accumulator(dtype, ReduceOp.SUM, "exact")
    half = len(operands) // 2
    sums = [Leaf(np.empty(out.size, acc.storage), wide=True) for _ in range(2)]

    def run() -> None:
        for part, target in zip((operands[:half], operands[half:]), sums, strict=True):
            reduce_tree(
                canonical(part), values_of,
                op=ReduceOp.SUM, dtype=dtype, acc=acc, out=target.values, final=False,
            )  # fmt: skip
        reduce_tree(
            (sums[0], sums[1]), values_of,
            op=ReduceOp.SUM, dtype=dtype, acc=acc, out=out, final=True, leaves=len(operands),
        )  # fmt: skip

    return run


def values_of(leaf: Leaf) -> Array:
    return leaf.values


def canonical(operands: list[Leaf]) -> Any:
    if len(operands) == 1:
        return operands[0]
    middle = split(0, len(operands))
    return canonical(operands[:middle]), canonical(operands[middle:])


def drawn(dtype: DType, size: int, seed: int) -> Array:
    """Normal numbers, of the size of gradients."""
    values = np.empty(size, dtype.storage)
    narrow(np.random.default_rng(seed).standard_normal(size) * 1e-3, FLOAT64, dtype, values)
    return values


# ---------------------------------------------------------------------------------------------------------------------
# Over the network


async def over_network(world: int, nbytes: int, rounds: int) -> dict[str, Any]:
    tensors = [drawn(FLOAT32, nbytes // 4, rank) for rank in range(world)]
    async with cluster(world) as jobs:

        def all_reduce(**how: Any) -> Callable[[], Awaitable[Any]]:
            return lambda: asyncio.gather(
                *(job.group.all_reduce(x, **how) for job, x in zip(jobs, tensors, strict=True))
            )  # fmt: skip

        variants = {
            "ring": all_reduce(reduce_order="ring"),
            "canonical": all_reduce(),
            "float64": all_reduce(precision="float64"),
            "exact": all_reduce(exact=True),
            "bfloat16 wire": all_reduce(wire="bfloat16"),
            "int8 wire": all_reduce(wire="int8"),
            "int4 wire": all_reduce(wire="int4"),
            "topk:1/64 wire": all_reduce(wire="topk:1/64"),
        }
        results = {name: await call() for name, call in variants.items()}
        for name in list(variants)[1:]:
            assert all(result.tobytes() == results[name][0].tobytes() for result in results[name]), name
        found = []
        for _ in range(rounds):
            times = {}
            for name in turned(list(variants)):
                began = time.perf_counter()
                await variants[name]()
                times[name] = time.perf_counter() - began
            found.append(times)
    return summary(found, "ring", elements=nbytes // 4)


# ---------------------------------------------------------------------------------------------------------------------
# Times

_turns = 0


def turned(names: list[str]) -> list[str]:
    """The names, beginning with another one each time."""
    global _turns
    _turns += 1
    start = _turns % len(names)
    return names[start:] + names[:start]


def seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def summary(rounds: list[dict[str, float]], base: str, *, elements: int) -> dict[str, Any]:
    least = min(times[base] for times in rounds)
    found: dict[str, Any] = {
        f"{base}_ms": round(least * 1e3, 3),
        f"{base}_ns_per_element": round(least / elements * 1e9, 3),
    }
    for name in rounds[0]:
        if name != base:
            ratios = sorted(times[name] / times[base] for times in rounds)
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            found[name] = {"ratio": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}
    return found


if __name__ == "__main__":
    main()
