"""pytest's side of `quicoll.sim.scenario`: one test for each seed, and options that choose the seeds.

    pytest --sim-seed 17        every decorated test with this seed alone; may be given several times
    pytest --sim-seeds 0:5000   with all of these (the second is not included)

While the seeds of a test run, a line now and then says how many are done, and one that takes long says how far it is.

A test for each seed, as users of pytest expect: `-x` stops at the first, `-k`, `--lf` and node ids choose, pytest-xdist
spreads them. pytest loads this module at its every start, also where no test uses it. So it imports nothing of quicoll,
which would bring in QUIC and numpy; `quicoll/__init__.py`, which comes before it, imports only the errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

__all__ = [
    "parse_seeds",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_runtest_logreport",
    "show_progress",
]

_EVERY_S = 10.0  # between two lines of progress
_PROPERTY = "quicoll.sim"  # of a report: the test and how many seeds it has


class _Progress:
    """How far the tests with seeds are; one for each start of pytest."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self.write = write
        self._last = time.monotonic()
        self._done: dict[str, tuple[int, int]] = {}  # by test: seeds done, and failed

    def seed_done(self, test: str, total: int, failed: bool) -> None:
        done, failures = self._done.get(test, (0, 0))
        self._done[test] = done, failures = done + 1, failures + failed
        if time.monotonic() - self._last > _EVERY_S and done < total:
            self.tell(f"{test}: {done} of {total} seeds, {failures or 'none'} failed")

    def tell(self, line: str) -> None:
        if self.write is not None:
            self._last = time.monotonic()
            self.write(line)


_progress = _Progress()


def show_progress(line: str) -> None:
    """Show a line on pytest's terminal, where this process has one."""
    _progress.tell(line)


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


def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")

    def write(line: str) -> None:
        terminal.ensure_newline()
        terminal.write_line(line)

    global _progress  # one for each start of pytest
    _progress = _Progress(None if terminal is None else write)


@pytest.hookimpl(trylast=True)  # after others have taken tests away
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    totals: dict[str, int] = {}
    chosen = [item for item in items if hasattr(getattr(item, "function", None), "sim_trial")]
    for item in chosen:
        test = item.nodeid.partition("[")[0]
        totals[test] = totals.get(test, 0) + 1
    for item in chosen:
        test = item.nodeid.partition("[")[0]
        item.user_properties.append((_PROPERTY, [test, totals[test]]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, list):
                _progress.seed_done(value[0], value[1], report.failed)
