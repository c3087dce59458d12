"""`quicoll bench`: what it refuses before anything is started, and its table."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from quicoll.bench.figures import row_of
from quicoll.cli.app import app
from quicoll.cli.bench import table_of
from quicoll.errors import LocalError
from quicoll_transport.errors import ConfigurationError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transfer", "--datagram", "9"], "datagram_bytes must be 0 or 1200 to 65507"),
        (["allreduce", "--vs", "nccl"], "allreduce is compared with gloo"),
        (["allreduce", "--sizes", "big"], "'big' is no size"),
        (["allreduce", "--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (["wan", "--profiles", "wan,lan"], "there is no link 'lan'; take metro, wan, badwan"),
        (["wan", "--profiles", ""], "1 to 500 cells are measured in a run, and these would be 0"),
        (["wan", "--link", "fast"], "'fast' is nothing of that"),
        (["wan", "--mib", "4,big"], "--mib takes whole numbers with commas, not '4,big'"),
        (["wan", "--ranks", "1"], "ranks are 2 to 16, not 1"),
        (["wan", "--congestion", "vegas"], "not 'vegas'"),
        (["wan", "--kind", "transfer", "--ranks", "4"], "transfer is between 2 ranks"),
        (["wan", "--mib", ",".join("1" * 100)], "1 to 500 cells are measured in a run, and these would be 1400"),
        (["wan", "--emulator", "/nowhere/wanem.py"], "there is no file /nowhere/wanem.py"),
        (["wan", "--emulator", "x", "--join"], "one of them"),
        (["wan", "--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_started(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(result.exception, LocalError | ConfigurationError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    "arguments", [["speed"], ["transfer", "-n", "3"], ["latency", "--datagram", "1452"], ["wan", "--operations", "1"]]
)
def test_a_work_has_its_own_options(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", *arguments]).exit_code == 2


def test_the_table_fits_into_80_characters() -> None:
    rounds = [{"seconds": 0.1234567, "cpu": 12.3}, {"seconds": 0.9876543, "cpu": 9.9}]
    case = {"name": "all_reduce 16 MiB", "kind": "all_reduce", "size": 16 << 20}
    row = row_of({"case": case, "samples": {"quicoll": rounds, "gloo": rounds}})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table_of("allreduce", [row]))
    lines = console.export_text().splitlines()
    assert lines[2].split() == [
        "all_reduce",
        "16",
        "MiB",
        "quicoll",
        "556",
        "ms",
        "123",
        "ms",
        "to",
        "988",
        "ms",
        "30.2",
        "662",
    ]
    assert lines[3].split()[0] == "gloo"
    assert lines[3].split()[-1] == "1"
