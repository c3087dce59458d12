"""docs/architecture.md against the code: rooms, their order, the names on the two ways; names in the other pages."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"quicoll": ROOT / "quicoll", "quicoll_transport": ROOT / "transport" / "quicoll_transport"}
TEXT = (ROOT / "docs" / "architecture.md").read_text()
WAYS = ("The way of one tensor", "The way of one datagram")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "certs/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def section(heading: str) -> str:
    _, found, below = TEXT.partition(f"\n## {heading}\n")
    assert found, heading
    return below.split("\n## ")[0]


def rooms_in_table(package: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", section(f"{package}, top to bottom"), re.MULTILINE)


def rooms_in_code(package: str) -> set[str]:
    found = set()
    for path in PACKAGES[package].iterdir():
        if path.suffix == ".py" and path.stem != "__init__":
            found.add(path.stem)
        elif (path / "__init__.py").exists():
            found.add(path.name)
    return found


def contract_named(start: str) -> dict[str, list[str]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (each for each in settings["contracts"] if each["name"].startswith(start))
    return dict(contract)


def layer_of(package: str) -> dict[str, int]:
    """The rank of each room in the contract of the package's layers, from the top."""
    contract = contract_named(f"{package}: rooms, top to bottom")
    return {
        room: number
        for number, layer in enumerate(contract["layers"])
        for room in (part.strip(" ()") for part in re.split("[:|]", layer))
    }


@cache
def names_of(module: Path) -> dict[str, set[str] | str]:
    """Top-level names of a module: with the names in its body for a class, with where it comes from for an import."""
    found: dict[str, set[str] | str] = {}
    for node in _statements(ast.parse(module.read_text()).body):
        if isinstance(node, ast.ClassDef):
            found[node.name] = {name for each in node.body for name in _bound(each)}
        elif isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        else:
            found.update({name: set() for name in _bound(node)})
    return found


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    return [each for node in body for each in (_statements(node.body) if isinstance(node, ast.If) else [node])]


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return []


def is_there(dotted: str) -> bool:
    """Whether a module of ours has this name: a module, a top-level name, or a name in the body of a class."""
    package, *parts = dotted.split(".")
    if package not in PACKAGES:
        return False
    place = PACKAGES[package]
    while parts and (place / parts[0] / "__init__.py").exists():
        place /= parts.pop(0)
    module = place / "__init__.py"
    if parts and (place / f"{parts[0]}.py").exists():
        module = place / f"{parts.pop(0)}.py"
    if not parts:
        return True
    name, *attributes = parts
    found = names_of(module).get(name)
    if found is None or not attributes:
        return found is not None
    if isinstance(found, str):
        return is_there(".".join([found, *attributes]))
    return len(attributes) == 1 and attributes[0] in found


def dotted_names(text: str) -> list[str]:
    return sorted(set(re.findall(r"`((?:quicoll|quicoll_transport)(?:\.\w+)+)\b", text)))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_stands_in_the_table_once(package: str) -> None:
    table = rooms_in_table(package)
    assert len(table) == len(set(table))
    assert set(table) == rooms_in_code(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_rooms_stand_in_the_order_of_the_contract(package: str) -> None:
    layers = layer_of(package)
    order = [layers[room] for room in rooms_in_table(package) if room in layers]
    assert len(order) > 5
    assert order == sorted(order)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_rooms_that_are_sans_io_are_those_of_the_contract(package: str) -> None:
    cores = contract_named("sans-IO by room")["source_modules"]
    rows = re.findall(r"^\| `(\w+)` \|.*\| *(\w*) *\|$", section(f"{package}, top to bottom"), re.MULTILINE)
    assert len(rows) == len(rooms_in_table(package))
    for room, said in rows:
        part = any(core.startswith(f"{package}.{room}.") for core in cores)
        assert said == ("yes" if f"{package}.{room}" in cores else "part" if part else ""), room


@pytest.mark.parametrize("way", WAYS)
def test_every_name_on_the_two_ways_is_there(way: str) -> None:
    names = dotted_names(section(way))
    assert len(names) > 10
    assert [name for name in names if not is_there(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_that_a_page_names_is_there(page: Path) -> None:
    names = [name for name in dotted_names(page.read_text()) if name not in LOGGERS]
    assert [name for name in names if not is_there(name)] == []


LOGGERS = {"quicoll.transport", "quicoll.coordinator"}


@pytest.mark.parametrize("page", ["security", "contract"])
def test_every_test_that_a_page_of_clauses_names_is_there(page: str) -> None:
    tests = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    named = re.findall(r"`([a-z0-9_]{12,})(?:\.\.\.)?`", (ROOT / "docs" / "internals" / f"{page}.md").read_text())
    assert len(named) > 20
    assert [name for name in named if name not in SETTINGS and f"def test_{name}" not in tests] == []


SETTINGS = {"max_handshakes", "handshake_ns", "credit_bytes", "window_bytes", "forged_packets", "quicoll_transport"}
