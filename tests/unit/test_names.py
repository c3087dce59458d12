"""One name, one thing: no public class or function name stands for two things anywhere in the two packages."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import quicoll
import quicoll_transport

ROOTS = [Path(package.__file__ or "").parent for package in (quicoll, quicoll_transport)]

# Names that several modules define because they mean the same thing in each.
SHARED = {
    "Group": "the blocking mirror of quicoll.Group",
    "Job": "the blocking mirror of quicoll.Job",
    "SharedState": "the blocking mirror of quicoll.SharedState",
    "Step": "the blocking mirror of quicoll.Step",
    "Tiers": "the blocking mirror of quicoll.Tiers",
    "Worker": "the blocking mirror of quicoll.train.Worker",
    "all_gather": "the schedule of an operation, and the operation that gradients go through",
    "all_reduce": "likewise",
    "all_to_all": "likewise",
    "broadcast": "likewise",
    "reduce_scatter": "likewise",
    "join": "the blocking mirror of quicoll.join",
    "main": "the entry point of a program",
    "register": "how a module of the command adds its own commands",
}


@functools.cache
def public_definitions(root: Path) -> tuple[tuple[str, str], ...]:
    return tuple(read_definitions(root))


def read_definitions(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, module) of public classes and functions that the package's modules define at their top level."""
    for path in sorted(root.rglob("*.py")):
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                yield node.name, module


def modules_by_name(roots: list[Path]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = defaultdict(set)  # a set: overloads define a name several times
    for root in roots:
        for name, module in public_definitions(root):
            found[name].add(module)
    return {name: sorted(modules) for name, modules in sorted(found.items())}


def test_no_public_name_stands_for_two_things() -> None:
    repeated = {name: modules for name, modules in modules_by_name(ROOTS).items() if len(modules) > 1}
    assert {name: modules for name, modules in repeated.items() if name not in SHARED} == {}


@pytest.mark.parametrize("name", SHARED)
def test_every_exception_is_needed(name: str) -> None:
    assert len(modules_by_name(ROOTS)[name]) > 1


def test_a_name_in_two_modules_is_found(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text("from p.room.one import Thing\n")
    (tmp_path / "room" / "one.py").write_text("class Thing: ...\ndef _own(): ...\n")
    (tmp_path / "two.py").write_text("def _own(): ...\nclass Outer:\n    class Inner: ...\nasync def Thing(): ...\n")
    there = tmp_path.name
    assert modules_by_name([tmp_path]) == {"Outer": [f"{there}.two"], "Thing": [f"{there}.room.one", f"{there}.two"]}
