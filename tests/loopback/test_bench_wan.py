"""`quicoll bench wan --emulator`: real sockets of two ranks in two network namespaces, beside Gloo.

Needs root, gcc and ip(8), and the emulator beside the project (../shared/wanem), which is used where it stands. That it
is measured, and that nothing is left behind; not how fast.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quicoll.bench.wan_emulated import demand_emulator
from quicoll.cli.main import main
from quicoll.errors import LocalError

EMULATOR = Path(__file__).resolve().parents[3] / "shared" / "wanem" / "wanem.py"


def _missing() -> str:
    try:
        demand_emulator(EMULATOR, gloo=True)
    except LocalError as error:
        return str(error)
    return ""


MISSING = _missing()

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "never"), pytest.mark.slow]


def left() -> list[Path]:
    """Namespaces of this process's emulator."""
    return list(Path("/run/netns").glob(f"qb{os.getpid() % 1_000_000}x*"))


def test_two_ranks_and_gloo_are_measured_over_an_emulated_link_which_is_then_taken_down(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = ["--link", "100mbit 10ms 0.1%", "--mib", "1", "--operations", "3", "--congestion", "bbr", "--json", "-"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "wan", "--emulator", str(EMULATOR), *row])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    (cell,) = json.loads(said.out)["cells"]
    assert sorted(cell["seconds"]) == ["gloo", "quicoll"]
    for name, (seconds,) in cell["seconds"].items():
        assert len(seconds) == 3, name
        assert all(each > 0.08 for each in seconds), f"{name}: 1 MiB at 100 Mbit/s takes 84 ms, whatever the machine"
    assert left() == []


def test_a_rank_that_fails_is_told_of_with_what_it_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUICOLL_CHUNK_BYTES", "many")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "wan", "--emulator", str(EMULATOR), "--link", "100mbit 10ms", "--congestion", "bbr"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "the emulated ranks ended with" in said
    assert "QUICOLL_CHUNK_BYTES" in said
    assert left() == []
