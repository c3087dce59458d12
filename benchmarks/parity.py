"""Processor time of parity: `PYTHONPATH=.:transport python benchmarks/parity.py`. JSON on standard output.

A group of 200 segments of 1411 bytes: each row of parity, and the repair of some that are missing; the least of many
rounds, in milliseconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from quicoll_transport.quic.erasure import parity_row, repair_segments

_SEGMENTS, _WORDS, _ROUNDS = 200, 177, 30


def least(work: Callable[[], object]) -> float:
    """Return the least time of many rounds."""
    took = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin)
    return round(min(took) * 1e3, 4)


def main() -> None:
    rng = np.random.default_rng(1)
    segments = rng.integers(0, 1 << 64, (_SEGMENTS, _WORDS), np.uint64, endpoint=False)
    rows = {j: parity_row(segments, j) for j in range(8)}
    figures: dict[str, float] = {"the first row": least(partial(parity_row, segments, 0))}
    figures["another row"] = sum(least(partial(parity_row, segments, j)) for j in range(1, 8)) / 7
    for lost in (1, 3, 8):
        missing = list(range(0, _SEGMENTS, _SEGMENTS // lost))[:lost]
        figures[f"repair of {lost}"] = least(partial(repair_segments, segments, missing, rows))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
