"""Run episodes: `PYTHONPATH=tests/helpers python -m quicoll_fuzz --inputs 1000000 --seed 1`.

Exit status 1: there were findings.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

from .episode import BATCHES, Finding, run_episode
from .hostile import Tally


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="quicoll_fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=100_000, help="stop after so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="or after so long")
    parser.add_argument("--size", type=int, default=5000, help="inputs of one episode")
    parser.add_argument("--episode", type=int, help="only this one, as a finding names it")
    parser.add_argument(
        "--trace-every", type=int, default=10, help="measure memory in every so-manieth episode; 0: never"
    )
    parser.add_argument("--only", choices=list(BATCHES), default="", help="mostly inputs of this kind")
    options = parser.parse_args()
    tally, findings, growth, began = Tally(), 0, 0, time.monotonic()
    number = options.episode if options.episode is not None else 0
    first_rss = 0
    while True:
        trace = options.trace_every > 0 and number % options.trace_every == 0
        try:
            grown = run_episode(options.seed, number, options.size, tally, trace=trace, only=options.only)
            growth = max(growth, grown)
        except Finding as found:
            findings += 1
            sys.stdout.write(f"FINDING in episode {number}: {found}\n")
            sys.stdout.flush()
        number += 1
        first_rss = first_rss or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if options.episode is not None or tally.inputs >= options.inputs:
            break
        if time.monotonic() - began > options.seconds:
            break
    summary = {
        "seed": options.seed,
        "episodes": number if options.episode is None else 1,
        "inputs": tally.inputs,
        "datagrams": tally.datagrams,
        "controls": tally.controls,
        "headers": tally.headers,
        "hostile_connections": tally.connections,
        "hostile_servers_dialled": tally.served,
        "honest_messages": tally.honest,
        "findings": findings,
        "growth_bytes": growth,
        "rss_kib_first_last": [first_rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss],
        "seconds": round(time.monotonic() - began, 1),
        "exceptions_of_the_quic_library": tally.foreign,
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
