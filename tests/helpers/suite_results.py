"""What becomes of tests that others wrote, over Gloo and over quicoll: lines of JSON, one for each test, from a pass.

    {"test": name, "ended": "passed" | "failed" | "skipped" | "lost", "seconds": ..., "why": ...}

Gloo decides what is asked: whatever it passes, quicoll has to pass.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Results", "passed", "run_pass", "say", "say_failed"]

Results = dict[str, dict[str, Any]]


def run_pass(command: Sequence[str], results: Path, environment: Mapping[str, str], names: Sequence[str]) -> Results:
    """Run a pass to its end, whatever that is.

    Args:
        command: The process.
        results: Where it writes its lines; what it says goes beside that.
        environment: Of the process.
        names: Of the tests that it was given; those without a line are lost.
    Returns:
        For each test how it ended.
    """
    with results.with_suffix(".log").open("wb") as said:
        subprocess.run(command, env=environment, stdout=said, stderr=subprocess.STDOUT, check=False)
    lines = results.read_text().splitlines() if results.exists() else []
    found = {each["test"]: each for each in map(json.loads, lines)}
    lost = {name: {"test": name, "ended": "lost", "why": "the pass ended before it"} for name in names}
    return {**lost, **found}


def passed(results: Results) -> list[str]:
    """The names of those that passed."""
    return [name for name, each in results.items() if each["ended"] == "passed"]


def say(line: str) -> None:
    """Print a line, at once."""
    print(line, flush=True)  # noqa: T201 - what these commands are for


def say_failed(ours: Results) -> None:
    """Print those that did not pass, and why."""
    for name, each in ours.items():
        if each["ended"] != "passed":
            say(f"  {name} {each['ended']}: {last_line(each.get('why', ''))}")


def last_line(why: str) -> str:
    errors = [line for line in why.splitlines() if re.match(r"[\w.]*(Error|Exception|Skip)\b", line)]
    return (errors or why.splitlines() or ["?"])[-1][:300]
