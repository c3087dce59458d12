"""pytest's side of `quicoll.sim.scenario`: one test for each seed, and options that choose the seeds.

    pytest --sim-seed 17        every decorated test with this seed alone; may be given several times
    pytest --sim-seeds 0:5000   with all of these (the second is not included)

A test for each seed, as users of pytest expect: `-x` stops at the first, `-k`, `--lf` and node ids choose, pytest-xdist
spreads them. pytest loads this module at its every start, also where no test uses it. So it imports nothing of quicoll,
which would bring in QUIC and numpy; `quicoll/__init__.py`, which comes before it, imports only the errors.
"""

from __future__ import annotations

import pytest

__all__ = ["parse_seeds", "pytest_addoption", "pytest_generate_tests"]


def parse_seeds(text: str) -> range:
    """ "A:B" for the seeds A to B - 1. Raises ValueError for anything else."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"seeds are given as A:B with A < B, for A to B - 1, not as {text!r}")
    return range(int(first), int(last))


def _seed(text: str) -> range:
    if not text.isdecimal():
        raise ValueError(f"a seed is an integer that is not negative, not {text!r}")
    return range(int(text), int(text) + 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("quicoll", "quicoll simulations")
    group.addoption(
        "--sim-seed", metavar="N", action="append", default=[], help="run simulations with this seed alone; repeatable"
    )
    group.addoption(
        "--sim-seeds", metavar="A:B", action="append", default=[], help="run simulations with the seeds A to B - 1"
    )


def _chosen(config: pytest.Config) -> list[int]:
    try:
        ranges = [_seed(text) for text in config.getoption("--sim-seed")]
        ranges += [parse_seeds(text) for text in config.getoption("--sim-seeds")]
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    return list(dict.fromkeys(seed for each in ranges for seed in each))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    trial = getattr(metafunc.function, "sim_trial", None)
    if trial is not None:
        seeds = _chosen(metafunc.config) or trial.seeds
        metafunc.parametrize("sim_seed", seeds, ids=[f"seed{seed}" for seed in seeds])
