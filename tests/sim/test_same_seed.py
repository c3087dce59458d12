"""The same seed is the same run, to the last byte: again, recorded, in another process, with other string hashes.

The digest is over every datagram's bytes and everything that the ranks and the coordinator say of themselves. A run
that read a real clock, drew real chance or walked over a set would have another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from depth import deep

import quicoll
import quicoll_transport
from quicoll.sim import Recording
from quicoll.sim.runner import run_seed
from quicoll.sim.subgroups import grouping

SOURCES = [str(Path(package.__file__ or "").resolve().parent.parent) for package in (quicoll, quicoll_transport)]
GROUPED = 14  # works in sub-groups
LEARNED = 1021  # with a spare that learns a state
SEEDS = (*range(int(os.environ.get("QUICOLL_TEST_SAME_SEEDS", deep("0", "5")))), GROUPED)
"""Seeds to compare; QUICOLL_TEST_SAME_SEEDS=200 for the long version."""

PROGRAM = """
import json, sys
from quicoll.sim.runner import run_seed

if sys.argv[1] == "warm":  # another process has other things behind it
    run_seed(99, steps=2)
outcomes = [run_seed(int(seed), steps=4) for seed in sys.argv[2:]]
print(json.dumps([[each.digest, each.events, each.virtual_s, each.committed, each.ok] for each in outcomes]))
"""


def fresh(hash_seed: str, kind: str) -> list[list[object]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", PROGRAM, kind, *map(str, SEEDS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [list(each) for each in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def here() -> list[list[object]]:
    outcomes = [run_seed(seed, steps=4) for seed in SEEDS]
    return [[each.digest, each.events, each.virtual_s, each.committed, each.ok] for each in outcomes]


@pytest.mark.parametrize("seed", [LEARNED, *deep((), range(200))])
def test_what_was_in_memory_before_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 1021: a spare that had not learned a chunk yet told the digest of whatever lay there."""
    digests = []
    for byte in (0x5A, 0xA5):
        with monkeypatch.context() as patch:
            for make in (np.empty, np.empty_like):
                patch.setattr(np, make.__name__, _found_with(make, byte))
            outcome = run_seed(seed)
        assert outcome.error is None, outcome.error
        digests.append(outcome.digest)
    assert digests[0] == digests[1]


def _found_with(make: Callable[..., Any], byte: int) -> Callable[..., Any]:
    @wraps(make)
    def made(*arguments: Any, **options: Any) -> Any:
        memory = make(*arguments, **options)
        if memory.dtype != object:
            memory.reshape(-1).view(np.uint8)[:] = byte
        return memory

    return made


def test_seeds_differ_and_are_worth_comparing(here: list[list[object]]) -> None:
    assert grouping(GROUPED) is not None
    other = run_seed(GROUPED + 1, ranks=2, steps=1)
    assert len({str(digest) for digest, *_ in here} | {other.digest}) == len(set(SEEDS)) + 1
    assert all(ok and isinstance(events, int) and events > 500 for _, events, _, _, ok in here)


def test_the_same_seed_again_and_recorded_is_the_same_run(here: list[list[object]]) -> None:
    for seed, (digest, events, *_) in zip(SEEDS, here, strict=True):
        outcome = run_seed(seed, steps=4, recorder=Recording(datagrams=1000).record)
        assert (outcome.digest, outcome.events) == (digest, events)


@pytest.mark.parametrize(("hash_seed", "kind"), [("0", "cold"), ("12345", "warm")])
def test_the_same_seed_in_a_fresh_process_with_other_hashes_is_the_same_run(
    here: list[list[object]], hash_seed: str, kind: str
) -> None:
    assert fresh(hash_seed, kind) == here
