"""What a loop that computes loses while an operation of its own rank is in flight: to the engine, and to processors.

    python benchmarks/beside.py [--mib 16] [--rounds 9] [--both] [--lanes N] [--engine process] [--lend]
                                [--loops NAME ...] [--json FILE]

Two processes, of which the first computes in pieces of about 0.5 ms (in pure Python, and with numpy in calls that keep
the interpreter's lock and in others that give it up: for 2 us each, and for 20 to 200, as training does), alone and
while an all_reduce is in flight; the other one waits for its own. With --both it computes as well: then there are two
engines' threads beside two that compute, and on two processors the loops lose those threads' time whatever the
interpreter does. With --lanes the two go over QUIC, with so many lanes; 0 has none. With --engine process their engines
are in processes of their own, over QUIC too; with --lend the tensors are of `quicoll.empty`.

Told are, as medians over rounds that take turns: how much longer a piece takes beside the operation; the part of a
piece for which its thread had no processor or not the interpreter's lock (wall clock less that thread's CPU time); the
part of the time that the engine's thread ran; how long the operation takes with the loop beside it, and by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from lanes import LanesUsed

import quicoll.blocking
from quicoll.launch.supervisor import Supervisor

MIB = 1 << 20
PIECE_S = 0.0005
BATCH, WIDTH = 64, 256
ALONE = 400  # pieces that are timed without an operation


def pure_python(times: int) -> float:
    """Work that holds the interpreter's lock."""
    total = 0.0
    for number in range(times):
        total += number * 0.5
    return total


def with_numpy(times: int) -> float:
    """Small calls of numpy, as an optimizer's or a data loader's; it gives the lock up in none of them."""
    row = np.ones(256, np.float32)
    for _ in range(times):
        row = row * np.float32(0.5) + np.float32(1.0)
    return float(row[0])


def with_longer_rows(times: int) -> float:
    """The same with rows of 4096 numbers: numpy gives the lock up in each call, and wants it back after it."""
    row = np.ones(4096, np.float32)
    for _ in range(times):
        row = row * np.float32(0.5) + np.float32(1.0)
    return float(row[0])


def training(times: int) -> float:
    """Forward, backward and update of a perceptron of three layers: what computes gives the lock up while it does."""
    weights = [_drawn(WIDTH, WIDTH) for _ in range(3)]
    batch = _drawn(BATCH, WIDTH)
    for _ in range(times):
        values = [batch]
        for each in weights:
            values.append(np.maximum(values[-1] @ each, 0))
        slope = values[-1]
        for layer in reversed(range(3)):
            slope = slope * (values[layer + 1] > 0)
            change = values[layer].T @ slope
            slope = slope @ weights[layer].T
            weights[layer] -= np.float32(1e-6) * change
    return float(weights[0][0, 0])


def _drawn(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, columns), np.float32) / np.float32(columns)


LOOPS = (pure_python, with_numpy, with_longer_rows, training)


def engine_seconds() -> float:
    """Return the CPU time of the engine's thread."""
    (thread,) = [each for each in threading.enumerate() if each.name.startswith("quicoll-")]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def times_of(work: Callable[[int], float]) -> int:
    """Return how often `work` does its part in a piece."""
    work(100)
    began = time.perf_counter()
    work(100)
    return max(1, round(100 * PIECE_S / (time.perf_counter() - began)))


def piece(work: Callable[[int], float], times: int) -> tuple[float, float]:
    """Return the seconds of one piece by the wall's clock, and by its thread's."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work(times)
    return time.perf_counter() - wall, time.thread_time() - cpu


def beside(
    group: quicoll.blocking.Group, tensor: np.ndarray, out: np.ndarray, work: Callable[[int], float], times: int
) -> dict[str, float]:
    """One round: pieces alone, the operation alone, both, and pieces alone once more.

    Before and after, since the machine's own speed moves by more than what is looked for, within a second.
    """
    alone = [piece(work, times) for _ in range(ALONE // 2)]
    group.barrier()
    began = time.perf_counter()
    group.all_reduce(tensor, out=out)
    by_itself = time.perf_counter() - began
    group.barrier()
    engine = engine_seconds()
    began = time.perf_counter()
    handle = group.all_reduce(tensor, out=out, async_op=True)
    pieces = []
    while not handle.done():
        pieces.append(piece(work, times))
    took = time.perf_counter() - began
    engine = engine_seconds() - engine
    handle.wait()
    alone += [piece(work, times) for _ in range(ALONE // 2)]
    wall, cpu = sum(each[0] for each in pieces), sum(each[1] for each in pieces)
    return {
        "slowdown": wall / len(pieces) / statistics.mean(each[0] for each in alone) - 1,
        "waiting": 1 - cpu / wall,
        "waiting_alone": 1 - sum(each[1] for each in alone) / sum(each[0] for each in alone),
        "engine": engine / took,
        "operation_s": took,
        "operation_alone_s": by_itself,
    }


def rank(options: argparse.Namespace) -> None:
    """Carry out the rounds as one of two ranks."""
    found: dict[str, list[dict[str, float]]] = {}
    used = LanesUsed()
    with quicoll.blocking.join(join_timeout=60.0, observer=used) as job:
        make = quicoll.empty if options.lend else np.empty
        tensor, out = (make(options.mib * MIB // 4, np.float32) for _ in range(2))
        tensor[:] = 1
        group = job.group
        used.wait(options.lanes or 0)
        group.all_reduce(tensor, out=out)
        for number in range(options.rounds + 1):
            for work in [each for each in LOOPS if each.__name__ in options.loops]:
                if job.rank == 0 or options.both:
                    measured = beside(group, tensor, out, work, times_of(work))
                    if number:  # the first one makes what later ones find
                        found.setdefault(work.__name__, []).append(measured)
                else:
                    group.barrier()
                    group.all_reduce(tensor, out=out)
                    group.barrier()
                    group.all_reduce(tensor, out=out)
        if job.rank == 0:
            options.rank.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--both", action="store_true", help="both ranks compute")
    parser.add_argument("--lanes", type=int, help="over QUIC, with so many lanes")
    parser.add_argument("--engine", choices=("thread", "process"), default="thread", help="where engines run")
    parser.add_argument("--lend", action="store_true", help="tensors of quicoll.empty")
    names = [each.__name__ for each in LOOPS]
    parser.add_argument("--loops", nargs="+", choices=names, default=names)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options)
        return
    if options.lanes is not None:
        os.environ |= {"QUICOLL_LOCAL": "off", "QUICOLL_LANES": str(options.lanes)}
    os.environ["QUICOLL_ENGINE"] = options.engine
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the other processor is the other rank's
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "told.json"
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--rank", str(told)]
        outcome = asyncio.run(Supervisor(command, workers=2, max_restarts=0, lost_after=60.0).run())
        if outcome.exit_status:
            sys.exit(outcome.reason)
        found = json.loads(told.read_text())
    for name, rounds in found.items():
        median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        print(
            f"{name:16} {median['slowdown']:6.1%} longer, {median['waiting']:5.1%} of it waiting "
            f"(alone {median['waiting_alone']:.1%}), the engine took {median['engine']:.1%}; "
            f"the operation {median['operation_s'] * 1e3:.0f} ms, "
            f"by itself {median['operation_alone_s'] * 1e3:.0f} ms"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"mib": options.mib, "both": options.both, "rounds": found}, indent=1))


if __name__ == "__main__":
    main()
