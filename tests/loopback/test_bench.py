"""`quicoll bench` over real processes, as short as it can be: that everybody takes part, not how fast."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quicoll.cli.main import main

pytestmark = [pytest.mark.loopback, pytest.mark.warm]


def bench(*arguments: str) -> int | str | None:
    """The command in this process, which starts those that take part; the exit status."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments, "--rounds", "1"])
    return ended.value.code


Measured = Callable[..., dict[str, Any]]


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Measured:
    def run(*arguments: str) -> dict[str, Any]:
        status = bench(*arguments, "--json", "-")
        said = capsys.readouterr()
        assert status == 0, said.err
        found: dict[str, Any] = json.loads(said.out)
        return found

    return run


def test_sums_are_timed_beside_gloo(measured: Measured) -> None:
    pytest.importorskip("torch", reason="Gloo is torch's")
    report = measured("allreduce", "--vs", "gloo", "--sizes", "4", "-n", "2")
    assert list(report["ratios"]) == ["all_reduce 4 B"]
    for case in report["cases"]:
        assert sorted(case["samples"]) == ["gloo", "quicoll"]
        assert all(sample["seconds"] > 0 for samples in case["samples"].values() for sample in samples)


def test_what_sharded_training_is_made_of_is_timed_beside_gloo(measured: Measured) -> None:
    pytest.importorskip("torch", reason="Gloo is torch's")
    report = measured("sharded", "--vs", "gloo", "--sizes", "100", "-n", "2")
    assert list(report["ratios"]) == ["all_gather 100 B", "reduce_scatter 100 B", "broadcast 100 B"]
    assert all(list(beside) == ["gloo"] for beside in report["ratios"].values())


def test_messages_are_timed_beside_stock_aioquic_and_steps_alone(measured: Measured) -> None:
    report = measured("transfer", "--vs", "aioquic", "--sizes", "100KiB", "--datagram", "1452")
    assert list(report["ratios"]["transfer 100 KiB"]) == ["aioquic"]
    report = measured("step", "--sizes", "0")
    assert report["ratios"] == {"empty step": {}}
    assert report["limits_mb_per_s"]["aes"] > 0


def test_ranks_of_a_job_measure_the_links_between_them_and_rank_0_tells(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    wan = ["bench", "wan", "--join", "--link", "1gbit 1ms", "--mib", "1", "--operations", "2"]
    report = tmp_path / "wan.json"
    with pytest.raises(SystemExit) as ended:
        main(["run", "-n", "2", "--", sys.executable, "-m", "quicoll.cli.main", *wan, "--json", str(report)])
    said = capfd.readouterr()
    assert ended.value.code == 0, said.out + said.err
    assert said.err.count("Gloo is left out") + said.out.count("Gloo is left out") == 1
    (cell,) = json.loads(report.read_text())["cells"]
    assert (cell["ranks"], cell["congestion"]) == (2, "cubic")
    assert len(cell["seconds"]["quicoll"][0]) == 2


def test_what_the_processes_said_is_shown_when_they_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUICOLL_TIMEOUT", "-1")
    assert bench("step", "--sizes", "0") == 1
    assert "timeout" in capsys.readouterr().err
