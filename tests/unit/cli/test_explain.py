"""`quicoll explain`: schedule, cost and picture of any collective."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quicoll.cli.app import app
from quicoll.cli.explain import size_of
from quicoll.errors import LocalError

COLLECTIVES = [
    "all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter", "all_to_all", "send",
    "barrier",
]  # fmt: skip


def explained(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_hierarchical_all_reduce_is_printed_priced_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    text = explained(
        "all_reduce", "--ranks", "6", "--bytes", "1MiB", "--algorithm", "hierarchical", "--sites", "3,3",
        "--plot", str(picture),
    )  # fmt: skip
    assert text.startswith("all_reduce/hierarchical world=6 elements=262144 leaves=6")
    for rank in range(6):
        assert f"rank {rank}: " in text
    assert "2 (N - 1) / N * S / B + 2 delays" in text
    rows = {
        line.split()[0]: line for line in text.splitlines() if line and line.split()[0] in ("direct", "tree", "ring")
    }
    assert sorted(rows) == ["direct", "ring", "tree"]
    assert [line.split()[0] for line in text.splitlines() if line.endswith(" *")] == ["hierarchical"]
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_explained(collective: str, tmp_path: Path) -> None:
    text = explained(collective, "--ranks", "3", "--bytes", "100k", "--plot", str(tmp_path / "x.svg"))
    assert text.startswith(f"{collective}/")
    assert "predicted" in text
    assert "limit" in text


def test_all_steps_are_printed_when_asked_for() -> None:
    short = explained("all_reduce", "--ranks", "4", "--bytes", "8MiB", "--algorithm", "direct")
    assert "more lines (--full)" in short
    long = explained("all_reduce", "--ranks", "4", "--bytes", "8MiB", "--algorithm", "direct", "--full")
    assert "--full" not in long
    assert len(long.splitlines()) > len(short.splitlines())


def test_of_many_ranks_the_first_are_printed_and_of_many_chunks_a_few_drawn_unless_asked_for_in_full(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "plan.svg"
    call = ("all_reduce", "--ranks", "12", "--bytes", "16MiB", "--algorithm", "direct", "--plot", str(picture))
    short = explained(*call)
    assert "rank 7: " in short
    assert "rank 8: " not in short
    assert "... 4 more ranks (--full)" in short
    few = picture.read_text().count("<line")
    long = explained(*call, "--full")
    assert "rank 11: " in long
    assert picture.read_text().count("<line") > 2 * few


def test_costs_are_told_as_json_too() -> None:
    found = json.loads(explained("all_reduce", "--ranks", "4", "--bytes", "8MiB", "--algorithm", "tree", "--json"))
    assert (found["algorithm"], found["nbytes"]) == ("tree", 8 << 20)
    assert found["plan"].startswith("all_reduce/tree world=4")
    assert "exchange" not in found["costs"], "which is for small tensors"
    assert {"direct", "ring", "tree"} <= set(found["costs"])
    assert found["costs"]["tree"]["predicted_s"] > found["limit_s"] > 0
    assert found["costs"]["tree"]["messages"] > 0


def test_auto_marks_the_one_it_takes() -> None:
    text = explained("all_reduce", "--ranks", "4", "--bytes", "2KiB", "--sites", "2,2", "--far-rtt-ms", "100")
    assert text.startswith("all_reduce/exchange")
    assert [line.split()[0] for line in text.splitlines() if line.endswith(" *")] == ["exchange"]
    assert "announcements" not in text


def test_the_figure_of_what_is_taken_is_one_also_where_auto_fits_its_messages_to_the_network() -> None:
    text = explained("all_reduce", "--ranks", "6", "--bytes", "1MiB", "--sites", "3,3")
    (row,) = [line for line in text.splitlines() if line.endswith(" *")]
    (predicted,) = re.findall(r"^predicted +(\S+ ms)", text, re.MULTILINE)
    (messages,) = re.findall(r"^messages +(\d+)$", text, re.MULTILINE)
    assert row.split()[:4] == ["hierarchical", *predicted.split(), messages]
    assert "* in messages of 128 KiB, which auto fits to the network; the other rows are of 1.00 MiB" in text
    named = explained("all_reduce", "--ranks", "6", "--bytes", "1MiB", "--sites", "3,3", "--algorithm", "direct")
    assert next(line for line in named.splitlines() if line.startswith("direct")).rstrip(" *") in text
    assert "in messages of" not in named


def test_the_answer_comes_before_the_steps_and_says_why_a_cheaper_ring_is_not_taken() -> None:
    text = explained("all_reduce")
    assert (
        text.index("predicted") < text.index("algorithm ") < text.index("auto never takes ring") < text.index("rank 0:")
    )
    assert "never takes" not in explained("all_reduce", "--algorithm", "ring")
    assert "never takes" not in explained("all_gather")


def test_what_travels_in_announcements_is_said_where_it_was_not_asked_for_otherwise() -> None:
    said = "auto runs none of these: what ranks give travels in the announcements of their calls"
    assert said in explained("all_reduce", "--ranks", "4", "--bytes", "64")
    assert said in explained("broadcast", "--ranks", "16", "--bytes", "1KiB")
    assert said not in explained("all_reduce", "--ranks", "4", "--bytes", "64", "--algorithm", "exchange")
    assert said not in explained("all_reduce", "--ranks", "17", "--bytes", "64")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sum"], "is not known"),
        (["all_reduce", "--algorithm", "torus"], "is not known"),
        (["broadcast", "--algorithm", "direct"], "is not known"),
        (["all_reduce", "--bytes", "many"], "is no size"),
        (["all_reduce", "--sites", "3,3"], "make 6"),
        (["all_reduce", "--sites", "a"], "are no sites"),
        (["reduce", "--root", "9"], "root 9"),
    ],
)
def test_what_cannot_be_explained_is_refused_with_a_reason(arguments: list[str], said: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["explain", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_sizes_have_units_of_powers_of_two() -> None:
    assert [size_of(text) for text in ("1000", "10k", "64MiB", "1.5 GB", "7B")] == [
        1000, 10 << 10, 64 << 20, 3 << 29, 7,
    ]  # fmt: skip
    for text in ("", "1T", "-5", "1,000"):
        with pytest.raises(LocalError, match="is no size"):
            size_of(text)
