"""`quicoll env` says what a rank would take, and why."""

from __future__ import annotations

import json

import pytest

from quicoll.cli.main import main


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, None)


def test_every_setting_is_printed_with_its_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("QUICOLL_COORDINATOR", "127.0.0.1:7001")
    run("env", "--json")
    settings = json.loads(capsys.readouterr().out)
    assert settings["node"] == {"value": "worker-2", "source": "RANK"}
    assert settings["coordinator"] == {"value": "127.0.0.1:7001", "source": "QUICOLL_COORDINATOR"}
    assert settings["timeout"]["source"] == "default"
    run("env")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(settings)
    assert any(line.split() == ["node", "worker-2", "RANK"] for line in lines)


def test_a_malformed_variable_is_one_line_and_exit_status_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUICOLL_WORLD_SIZE", "several")
    with pytest.raises(SystemExit) as ended:
        main(["env"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "world_size = 'several' (from QUICOLL_WORLD_SIZE)" in error
    assert "Traceback" not in error
