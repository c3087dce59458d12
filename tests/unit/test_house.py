"""The packages' structure: no circle of modules, every module in one layer, a small first level."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import quicoll
import quicoll_transport

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = [Path(package.__file__ or "").parent for package in (quicoll, quicoll_transport)]


def modules_of(root: Path) -> dict[str, Path]:
    """Return the files of a package by the names of their modules."""
    return {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(root.rglob("*.py"))
    }


def imports_of(module: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules that one imports, wherever the import stands: in a function or for types counts as well.

    `from package import name` is an import of the module `package.name` where there is one; a package on the way to
    a module is not, or each `__init__` that re-exports something would close a circle.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                if name in modules or base in modules:
                    yield name if name in modules else base


def circle(roots: list[Path]) -> list[str]:
    """Return the modules of one circle of imports, in its order; nothing where there is none."""
    modules = {name: path for root in roots for name, path in modules_of(root).items()}
    graph = {name: sorted({*imports_of(name, path, modules)} - {name}) for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_modules() -> None:
    assert circle(ROOTS) == []


@pytest.mark.parametrize(
    "back",
    [
        "import p.one",
        "from p.one import x",
        "from p import one",
        "from .one import x",
        "from . import one",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.one import x",
        "def f():\n    from p.one import x",
    ],
)
def test_a_circle_is_found_however_it_is_closed(tmp_path: Path, back: str) -> None:
    root = tmp_path / "p"
    root.mkdir()
    (root / "__init__.py").write_text("from p.two import y\n")
    (root / "one.py").write_text("from p.two import y\nx = 1\n")
    (root / "two.py").write_text("y = 1\n")
    assert circle([root]) == []
    (root / "two.py").write_text(f"{back}\ny = 1\n")
    assert sorted(set(circle([root]))) == ["p.one", "p.two"]


def layer_contracts() -> list[dict[str, Any]]:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return [contract for contract in contracts if contract["type"] == "layers"]


def test_both_packages_have_layers() -> None:
    containers = [container for contract in layer_contracts() for container in contract["containers"]]
    assert {"quicoll", "quicoll_transport"} <= {*containers}
    assert len(containers) == len({*containers})


def test_no_import_is_excepted_from_a_contract() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert contracts["exclude_type_checking_imports"] is False
    assert [contract["name"] for contract in contracts["contracts"] if "ignore_imports" in contract] == []


@pytest.mark.parametrize("contract", layer_contracts(), ids=lambda contract: contract["name"])
def test_every_module_is_in_one_layer(contract: dict[str, Any]) -> None:
    assert contract["exhaustive"] is True, "a module that is in no layer has to break the contract"
    modules = {name for root in ROOTS for name in modules_of(root)}
    named = sorted(name for layer in contract["layers"] for name in re.split(r"\s*[:|]\s*", layer))
    for container in contract["containers"]:
        assert named == sorted(
            name.removeprefix(f"{container}.")
            for name in modules
            if name.startswith(f"{container}.") and "." not in name.removeprefix(f"{container}.")
        )


def test_the_first_level_of_quicoll_has_twelve_files_at_most() -> None:
    assert len(list(ROOTS[0].glob("*.py"))) <= 12


def test_no_text_has_marks_of_a_merge_that_was_not_finished() -> None:
    """Neither the linter nor a test reads documents, the changelog or a Makefile."""
    names = ("benchmarks", "certs", "docs", "examples", "quicoll", "tests", "transport")
    folders = [REPOSITORY / name for name in names]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".md", ".py", ".toml")]
    files += sorted(path for path in REPOSITORY.iterdir() if path.is_file())
    marked = [
        str(path.relative_to(REPOSITORY))
        for path in files
        if re.search(r"^(<{7}|>{7}) ", path.read_text(errors="replace"), re.MULTILINE)
    ]
    assert len(files) > 500
    assert marked == []


def test_whatever_is_excepted_from_a_check_says_why_beside_it() -> None:
    """On its line, or in a comment above. Tests are not checked for types, so there is nothing to except in them."""
    mark = re.compile(r"  # (?:type: ignore\[[a-z, -]+\]|noqa: [A-Z0-9]+(?:, [A-Z0-9]+)*)")
    silent, count = [], 0
    for folder in ("quicoll", "transport", "tests", "benchmarks", "examples"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            above = ""
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if found := mark.search(line):
                    count += 1
                    reason = mark.sub("", line[found.start() :]).strip(" -#")
                    above_says = above.lstrip().startswith("#") and "type: ignore" not in above
                    is_idle = "type: ignore" in line and folder == "tests" and path.name != "test_typing.py"
                    if is_idle or (not reason and not above_says and path.name != "test_typing.py"):
                        silent.append(f"{path.relative_to(REPOSITORY)}:{number}")
                above = line
    assert count > 20
    assert silent == []
