"""What a reduction costs, in GB/s and against plain numpy; prints JSON.

    python benchmarks/reduce.py [--mib 1] [--leaves 4] [--rounds 30]

For each dtype, on chunks of --mib MiB of the tensor's own type that lie in memory as received messages do (a pool
larger than the caches is gone through in turn):

    sum_gb_s        reduce_tree of --leaves leaves to a finished sum: bytes of leaves read, for each second avg_gb_s
    the same to a finished avg, which divides (integers: in 64 bits) combine_gb_s    one combine of two arrays of
    the accumulator's type, in cache: bytes of both operands widen_gb_s      bytes of the tensor's type widened
    finish_gb_s     round once and canonicalise: bytes of the tensor's type written nan_share       the part of
    finish that looks for NaN, where there is none against_numpy   time of plain np.add over the same leaves in
    their own type, without any of our promises, divided by
                    the sum's time: below 1 is what the promises cost (null for bfloat16, which numpy cannot add)

Times are the least of --rounds, because a shared machine only ever adds; the ratio is taken pair by pair and is the
median.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from quicoll.numerics.canonical_order import split
from quicoll.numerics.dtypes import DTYPES, FLOAT64, Array, DType, NumberKind, narrow
from quicoll.numerics.reduce import REDUCE_BLOCK, ReduceOp, accumulator, combine, finish, reduce_tree, widen

POOL_BYTES = 64 << 20  # larger than the caches of one core


@dataclass(frozen=True)
class Leaf:
    values: Array
    wide: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=float, default=1.0, help="chunk size in MiB of the tensor's type")
    parser.add_argument("--leaves", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--dtypes", nargs="*", default=["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64"]
    )
    options = parser.parse_args()
    report = {
        "machine": f"{platform.platform()}, Python {platform.python_version()}, numpy {np.__version__}",
        "chunk_mib": options.mib,
        "leaves": options.leaves,
        "block": REDUCE_BLOCK,
        "dtypes": {
            name: measure(DTYPES[name], int(options.mib * (1 << 20)), options.leaves, options.rounds)
            for name in options.dtypes
        },
    }
    json.dump(report, sys.stdout, indent=2)
    print()


def measure(dtype: DType, nbytes: int, leaves: int, rounds: int) -> dict[str, float | None]:
    size = nbytes // dtype.itemsize
    rng = np.random.default_rng(1)
    acc = accumulator(dtype, ReduceOp.SUM)
    chunks = cycle([drawn(dtype, size, rng) for _ in range(max(2 * leaves, POOL_BYTES // nbytes))])
    out = np.empty(size, dtype.storage)
    wide = [np.empty(size, acc.storage) for _ in range(4)]
    for array in wide:
        widen(next(chunks), dtype, acc, array)

    def tree(op: ReduceOp) -> None:
        operands = canonical([Leaf(next(chunks)) for _ in range(leaves)])
        of_op = accumulator(dtype, op)
        reduce_tree(operands, values_of, op=op, dtype=dtype, acc=of_op, out=out, final=True, leaves=leaves)

    def plain() -> None:
        np.add(next(chunks), next(chunks), out=out)
        for _ in range(leaves - 2):
            np.add(out, next(chunks), out=out)

    blocks = [(a, min(a + REDUCE_BLOCK, size)) for a in range(0, size, REDUCE_BLOCK)]

    def finishing() -> None:
        for a, b in blocks:
            finish(ReduceOp.SUM, wide[0][a:b], leaves, dtype, out[a:b])

    def looking() -> None:
        for a, b in blocks:
            math.isnan(wide[0][a:b].max())

    finish_s = least(finishing, rounds)
    by_numpy = dtype.storage.name == dtype.name
    ratio = None if not by_numpy else statistics.median(pairs(plain, lambda: tree(ReduceOp.SUM), rounds))
    return {
        "sum_gb_s": rate(leaves * nbytes, least(lambda: tree(ReduceOp.SUM), rounds)),
        "avg_gb_s": rate(leaves * nbytes, least(lambda: tree(ReduceOp.AVG), rounds)),
        "combine_gb_s": rate(
            2 * size * acc.itemsize, least(lambda: combine(ReduceOp.SUM, acc, wide[0], wide[1], wide[2]), rounds)
        ),
        "widen_gb_s": rate(nbytes, least(lambda: widen(next(chunks), dtype, acc, wide[3]), rounds)),
        "finish_gb_s": rate(nbytes, finish_s),
        "nan_share": round(least(looking, rounds) / finish_s, 3) if dtype.kind is NumberKind.FLOAT else 0.0,
        "against_numpy": None if ratio is None else round(ratio, 3),
    }


def values_of(leaf: Leaf) -> Array:
    return leaf.values


def drawn(dtype: DType, size: int, rng: np.random.Generator) -> Array:
    if dtype.part is not None:
        return drawn(dtype.part, 2 * size, rng).view(dtype.storage)
    if dtype.kind is not NumberKind.FLOAT:
        return rng.integers(0, 100, size).astype(dtype.storage)
    values = np.empty(size, dtype.storage)
    narrow(rng.standard_normal(size).astype(np.float32).astype(np.float64), FLOAT64, dtype, values)
    return values


def canonical(operands: list[Leaf]) -> Any:
    if len(operands) == 1:
        return operands[0]
    middle = split(0, len(operands))
    return canonical(operands[:middle]), canonical(operands[middle:])


def timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def least(call: Callable[[], None], rounds: int) -> float:
    call()
    return min(timed(call) for _ in range(rounds))


def pairs(first: Callable[[], None], second: Callable[[], None], rounds: int) -> Iterator[float]:
    for _ in range(rounds):
        yield timed(first) / timed(second)


def rate(nbytes: int, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 2)


if __name__ == "__main__":
    main()
