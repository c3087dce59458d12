"""The notebooks of examples/: every cell runs, and prints what it is stored with."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebooks import printed_by_cells, stored

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.ipynb")))
async def test_every_cell_of_a_notebook_runs_and_prints_what_it_is_stored_with(name: str) -> None:
    said = await printed_by_cells(EXAMPLES / name)
    kept = [text for _, text in stored(EXAMPLES / name)]
    assert [text for text in kept if text], "there is something to compare"
    assert [now for now, text in zip(said, kept, strict=True) if text] == [text for text in kept if text]


def test_no_notebook_is_stored_with_a_count_of_runs_or_anything_but_text() -> None:
    for path in EXAMPLES.glob("*.ipynb"):
        for cell, _ in stored(path):
            assert cell["execution_count"] is None, path
            assert all(output["output_type"] == "stream" for output in cell["outputs"]), path
