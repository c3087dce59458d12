"""torchft's own tests of process groups on the CPU, over Gloo and over quicoll: `python tests/torchft_suite.py`.

torchft ships them in its package; `--torchft DIR` takes a checkout (with its compiled part) instead of what is
installed. Gloo decides what is asked: whatever makes a process group and passes over Gloo has to pass over quicoll, by
the adapter in examples/torchft_groups.py. tests/helpers/torchft_pass.py says how.

The run fails if quicoll fails one of these, or if there are none. Where there is no torchft it says so, and has nothing
to run. The JSON has how each test ended over each of them, and why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# A script, and no test that pytest finds the helpers for: the path comes before the imports that need it (E402).
HELPERS = Path(__file__).parent / "helpers"
sys.path.insert(0, str(HELPERS))

import suite_results
from suite_results import Results, passed, say, say_failed
from torch_processes import environment

__all__ = ["asked", "main", "run_pass"]

UNDECIDED = "test_streaming_diloco_upscale"
"""Whether the third replica of these asks for a quorum before the other two have ended is a race of their threads. Of
twelve, one to four fail over Gloo, others each time."""


def run_pass(backend: str, directory: Path, names: Sequence[str] = (), checkout: Path | None = None) -> Results:
    """Run tests over a backend.

    Args:
        backend: "gloo" or "quicoll".
        directory: Where what the processes say goes.
        names: Of the tests; none: every one.
        checkout: Of torchft; None takes what is installed.
    Returns:
        For each test how it ended, why, and how many groups were made for it.
    """
    results = directory / f"{backend}.jsonl"
    command = [sys.executable, str(HELPERS / "torchft_pass.py"), backend, str(results), *names]
    environ = environment() | {"PYTHONHASHSEED": "0"}  # names of tests have places in a list that is made of a set
    if checkout is not None:
        environ["PYTHONPATH"] = os.pathsep.join([str(checkout.resolve()), environ["PYTHONPATH"]])
    return suite_results.run_pass(command, results, environ, names)


def asked(gloo: Results) -> list[str]:
    """The tests that quicoll has to pass, of how those of torchft ended over Gloo."""
    return [name for name in passed(gloo) if gloo[name]["groups"] and UNDECIDED not in name]


def by_class(names: Sequence[str]) -> Counter[str]:
    return Counter(name.removeprefix("torchft.").rpartition(".")[0] for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchft", type=Path, default=None, metavar="DIR", help="a checkout, in front of all else")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="their names; none: all of them")
    parser.add_argument("--json", type=Path, default=None, help="a file for how each test ended")
    given = parser.parse_args()
    if given.torchft is not None:
        sys.path.insert(0, str(given.torchft))
    for name in ("torchft", "parameterized"):
        if importlib.util.find_spec(name) is None:
            say(f"skipped: there is no {name} for {sys.executable}; pip install torchft-nightly parameterized")
            return 0
    directory = Path(tempfile.mkdtemp(prefix="torchft-suite-"))
    say(f"what the processes say: {directory}")
    gloo = run_pass("gloo", directory, given.tests, given.torchft)
    names = asked(gloo)
    ours = run_pass("quicoll", directory, names, given.torchft) if names else {}
    good = by_class(passed(ours))
    for tests, count in by_class(names).items():
        say(f"{tests}: Gloo passes {count}, quicoll {good[tests]} of these")
    many, sound = len(names), len(passed(ours))
    say(f"of {len(gloo)} tests Gloo passes {len(passed(gloo))}, {many} of which ask a group; quicoll passes {sound}")
    say_failed(ours)
    if given.json:
        given.json.write_text(json.dumps({"gloo": gloo, "quicoll": ours}, indent=1) + "\n")
    return int(not names or sound < many)


if __name__ == "__main__":
    os.nice(10)
    sys.exit(main())
