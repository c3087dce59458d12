"""Notebooks without a kernel: their code cells run one after the other in one scope on one loop, as a kernel does it.

A cell may await at its top, and what its last line gives is shown. Where a cell is stored with what it printed, it has
to print that; what differs from run to run is stored without. `python tests/helpers/notebooks.py FILE...` runs
notebooks and stores anew what cells printed that are stored with output.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["printed_by_cells", "stored"]


def cells_of(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored(notebook: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Each code cell, and the text that it is stored with."""
    for cell in cells_of(json.loads(notebook.read_text())):
        yield cell, "".join("".join(output["text"]) for output in cell["outputs"])


async def printed_by_cells(notebook: Path) -> list[str]:
    """Run all cells; what each printed. What one raises names it."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    said = []
    for number, (cell, _) in enumerate(stored(notebook)):
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                await run_cell("".join(cell["source"]), scope, f"<{notebook.name}, code cell {number}>")
        except Exception as error:
            error.add_note(f"in code cell {number} of {notebook.name}:\n{''.join(cell['source'])}")
            raise
        said.append(out.getvalue())
    return said


async def run_cell(source: str, scope: dict[str, Any], name: str) -> None:
    tree = ast.parse(source, name)
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    value = eval(compile(tree, name, "exec", flags), scope)  # noqa: S307 - that is what a notebook is
    if inspect.iscoroutine(value):
        await value
    if isinstance(shown, ast.Expr):
        value = eval(compile(ast.Expression(shown.value), name, "eval", flags), scope)  # noqa: S307 - likewise
        if inspect.iscoroutine(value):
            value = await value
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def store(path: Path) -> None:
    notebook = json.loads(path.read_text())
    for cell, text in zip(cells_of(notebook), asyncio.run(printed_by_cells(path)), strict=True):
        if cell["outputs"]:
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}]
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        store(Path(each))
