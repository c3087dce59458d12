"""The documentation site, without Sphinx: each page has its place, each module its page, the commands are whole."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import quicoll

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = DOCS / "api"


Tool = Callable[[str], Any]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Import a module that lies beside the pages."""
    monkeypatch.syspath_prepend(str(DOCS))

    def load(name: str) -> Any:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def in_toctrees(page: Path) -> list[str]:
    """What the toctrees of a page list, as paths below docs without their endings."""
    text = page.read_text()
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"^\.\. toctree::\n((?:[ ]{3}.*\n|\n)+)", text, re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    folder = page.parent.relative_to(DOCS)
    return [str(folder / line) for line in lines if line and not line.startswith(":")]


def test_every_page_is_in_one_table_of_contents() -> None:
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    pages |= {str(path.relative_to(DOCS)).removesuffix(".rst") for path in API.glob("*.rst")}
    listed = [*in_toctrees(DOCS / "index.md"), *in_toctrees(API / "index.rst")]
    assert sorted(listed) == sorted(pages - {"index"})


def described_modules() -> list[str]:
    return sorted(path.stem for path in API.glob("quicoll*.rst"))


def test_every_public_module_has_a_page() -> None:
    """Modules that `quicoll` tells of, those for torch, those that a program of the documents imports from."""
    public = {f"quicoll.{name}" for name in dir(quicoll) if isinstance(getattr(quicoll, name), ModuleType)}
    public |= {"quicoll", "quicoll.errors", "quicoll.torch", "quicoll.torch_backend"}
    for document in [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("[!i]*/*.md"), *ROOT.glob("examples/*.py")]:
        public |= set(re.findall(r"^from (quicoll[\w.]*) import", document.read_text(), re.MULTILINE))
    assert sorted(public - set(described_modules()) - NOT_FOR_PROGRAMS) == []


NOT_FOR_PROGRAMS = {
    "quicoll.membership.journal",  # what the program for Ray does in the place of `quicoll coordinator`
    "quicoll.membership.serving",
    "quicoll.rendezvous.scratch",
}


def test_every_page_takes_all_of_its_module() -> None:
    """By automodule, which goes by `__all__`; `make docs` fails where a public name is on no page all the same."""
    for name in described_modules():
        page = (API / f"{name}.rst").read_text()
        assert f".. automodule:: {name}\n" in page
        assert importlib.util.find_spec(name) is not None, name
        for names in re.findall(r":exclude-members: (.*)", page):  # those that another page has
            assert set(names.split(", ")) <= set(quicoll.__all__), name


def test_the_page_of_commands_is_what_the_parser_says(tool: Tool) -> None:
    assert (DOCS / "commands.md").read_text() == tool("commands_page").page(), (
        "python docs/commands_page.py makes it anew"
    )


def test_every_command_and_option_is_on_the_page_of_commands() -> None:
    """Counted in the source, by another way than the page is made."""
    page = (DOCS / "commands.md").read_text()
    for path in sorted((ROOT / "quicoll" / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.endswith(".command") and node.args:
                name = ast.literal_eval(node.args[0])
                assert re.search(rf"^##+ quicoll (?:\w+ )?{name}$", page, re.MULTILINE), name
            if called == "typer.Option":
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and "version" not in str(argument.value):
                        assert re.search(rf"^\| `[^`]*{argument.value.partition('/')[0]}\b", page, re.MULTILINE), (
                            argument.value
                        )


def test_a_docstring_keeps_its_code_and_its_tables(tool: Tool) -> None:
    lines = [
        "What it does, with *args and `**options`.",
        "",
        "    x = call()",
        "    ...",
        "Behind it.",
        "",
        "rank: a number,",
        "    from 0.",
        "node: a name.",
        "",
        "Args:",
        "    x: What is given.",
    ]
    assert tool("plain_docstrings").plain_to_rst(lines) == [
        r"What it does, with \*args and `**options`.",
        "",
        "",
        ".. code-block:: text",
        "",
        "    x = call()",
        "    ...",
        "",
        "Behind it.",
        "",
        "- rank: a number,",
        "  from 0.",
        "- node: a name.",
        "",
        "Args:",
        "    x: What is given.",
    ]
