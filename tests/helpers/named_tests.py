"""Mutants that one test finds: it passes, then the code is broken, and it fails."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Below", "run_named"]

TESTS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Below:
    """A mutant that is found by this test."""

    change: Callable[[pytest.MonkeyPatch], None]
    file: str
    test: str


def run_named(mutant: Below) -> None:
    """Run the named test, with the first of its parameters; of fixtures it may have a directory and a patch."""
    path = TESTS / mutant.file
    spec = importlib.util.spec_from_file_location(f"mutated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    test: Any = getattr(module, mutant.test)
    given: dict[str, Any] = {}
    for mark in getattr(test, "pytestmark", ()):
        assert mark.name != "usefixtures", f"{mutant.test} needs fixtures"
        if mark.name == "parametrize":
            names, values = mark.args[0], next(iter(mark.args[1]))
            several = list(names) if isinstance(names, tuple) else names.split(", ")
            given |= dict(zip(several, values, strict=True)) if len(several) > 1 else {several[0]: values}
    wanted = inspect.signature(test).parameters
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        given |= {
            name: value for name, value in (("tmp_path", Path(directory)), ("monkeypatch", patch)) if name in wanted
        }
        if inspect.iscoroutinefunction(test):
            asyncio.run(test(**given))
        else:
            test(**given)
