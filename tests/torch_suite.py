"""Torch's own tests of a backend, over Gloo and over quicoll: `python tests/torch_suite.py --world 3 4`.

They are what torch runs for its own backends, and ships (tests/helpers/torch_suite_pass.py). Gloo decides what is
asked: whatever it passes, quicoll has to pass. First come the tests that torch runs for Gloo on a machine without GPUs,
then all others, which torch skips: those for GPUs (they get the CPU), for other backends, for eight ranks, and those
that it has given up.

The run fails if quicoll fails a test that Gloo has passed, or if Gloo passes none. The JSON has how each test ended
over each of them, and why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# A script, and no test that pytest finds the helpers for: the path comes before the imports that need it (E402).
HELPERS = Path(__file__).parent / "helpers"
sys.path.insert(0, str(HELPERS))

import suite_results
from suite_results import Results, passed, say, say_failed
from torch_processes import environment

__all__ = ["main", "run_pass"]

Passes = dict[str, dict[str, Results]]
NEEDS_S = {"gloo": 100, "quicoll": 300}
"""For each test. What Gloo does not do in so much less time, it is not said to pass."""


def run_pass(backend: str, how: str, world: int, directory: Path, names: Sequence[str] = ()) -> Results:
    """Run tests over a backend.

    Args:
        backend: "gloo" or "quicoll".
        how: "asked" or "all": see the helper.
        world: How many ranks.
        directory: Where what the processes say goes.
        names: Of the tests; none: every one.
    Returns:
        For each test how it ended, why, and how many seconds it took.
    """
    results = directory / f"{backend}-{how}-{world}.jsonl"
    command = [sys.executable, str(HELPERS / "torch_suite_pass.py"), backend, how, str(world), str(results), *names]
    limit = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(NEEDS_S[backend])}
    return suite_results.run_pass(command, results, environment() | limit, names)


def compare(world: int, directory: Path, names: Sequence[str]) -> Passes:
    """Run tests with so many ranks; how they ended in each pass, over each backend."""
    asked = run_pass("gloo", "asked", world, directory, names)
    others = [name for name in asked if asked[name]["ended"] != "passed"]
    every = run_pass("gloo", "all", world, directory, others) if others else {}
    return {how: judged(how, world, directory, gloo) for how, gloo in (("asked", asked), ("all", every))}


def judged(how: str, world: int, directory: Path, gloo: Results) -> dict[str, Results]:
    """Run over quicoll what Gloo has passed."""
    can = passed(gloo)
    ours = run_pass("quicoll", how, world, directory, can) if can else {}
    say(f"{world} ranks, {how}: of {len(gloo)} tests Gloo passes {len(can)}, quicoll {len(passed(ours))} of these")
    say_failed(ours)
    return {"gloo": gloo, "quicoll": ours}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[3, 4], help="numbers of ranks; 3 and 4")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="their names; none: all of them")
    parser.add_argument("--json", type=Path, default=None, help="a file for how each test ended")
    asked = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="torch-suite-"))
    say(f"what the processes say: {directory}")
    found = [{"world": world, "passes": compare(world, directory, asked.tests)} for world in asked.world]
    if not asked.tests:  # these have ranks of their own
        found.append(
            {"world": 4, "passes": {"rpc": judged("rpc", 4, directory, run_pass("gloo", "rpc", 4, directory))}}
        )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    ours = [each["quicoll"] for here in found for each in here["passes"].values()]
    return int(not any(ours) or any(len(passed(each)) < len(each) for each in ours))


if __name__ == "__main__":
    os.nice(10)
    sys.exit(main())
