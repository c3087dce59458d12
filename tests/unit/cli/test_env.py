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


def test_under_torchrun_coordinator_and_certificates_are_agreed_when_the_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("MASTER_ADDR", "nowhere.invalid"), ("MASTER_PORT", "1"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    run("env", "--json")
    settings = json.loads(capsys.readouterr().out)
    for name in ("coordinator", "certs"):
        assert settings[name] == {"value": None, "source": "agreed when the ranks meet"}
    assert settings["world_size"] == {"value": 2, "source": "WORLD_SIZE"}
    monkeypatch.setenv("QUICOLL_CERTS", "mine")
    monkeypatch.setenv("QUICOLL_COORDINATOR", "127.0.0.1:7")
    run("env", "--json")
    settings = json.loads(capsys.readouterr().out)
    assert settings["certs"] == {"value": "mine", "source": "QUICOLL_CERTS"}
