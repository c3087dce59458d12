"""The command of a fuzzer whose episodes follow from (seed, number): runs and counts them, repeats one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Protocol

from .world import Finding

__all__ = ["RunEpisode", "main"]


class RunEpisode(Protocol):
    """Run one episode of `size` inputs and count in `tally`; `why`: reasons by number. Raises Finding."""

    def __call__(
        self, seed: int, episode: int, size: int, tally: dict[str, int], why: dict[str, int] | None = None
    ) -> None: ...


def main(prog: str, doc: str | None, run_episode: RunEpisode) -> int:
    """Run episodes until there were `--inputs`; return the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=5000, help="inputs of one episode")
    parser.add_argument("--episode", type=int, help="only this one, as a finding names it")
    options = parser.parse_args()
    tally: dict[str, int] = {"inputs": 0}
    why: dict[str, int] = {}
    findings, began = 0, time.process_time()
    episode = options.episode or 0
    while True:
        try:
            run_episode(options.seed, episode, options.size, tally, why)
        except Finding as found:
            findings += 1
            if options.episode is not None:
                raise
            _say(f"FINDING in episode {episode}: {found}")
            if findings >= 20:
                break
        episode += 1
        if episode % 20 == 0:
            _say(json.dumps({"episodes": episode, **tally}))
        if options.episode is not None or tally["inputs"] >= options.inputs:
            break
    for reason, count in sorted(why.items(), key=lambda item: -item[1])[:12]:
        _say(f"{count} {reason}")
    taken = round(time.process_time() - began, 1)
    _say(json.dumps({"seed": options.seed, "findings": findings, "cpu_seconds": taken, **tally}))
    return 1 if findings else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
