"""What `quicoll run` starts for what stands on its line, and what it says to what it cannot start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from quicoll.cli import run
from quicoll.cli.main import main
from quicoll.launch.supervisor import RunExit


class Recorder:
    """Takes what a supervisor takes, and starts nothing."""

    given: tuple[list[str], dict[str, Any]]
    joined = True

    def __init__(self, command: list[str], **options: Any) -> None:
        Recorder.given = (command, options)

    async def run(self) -> RunExit:
        return RunExit(exit_status=0, reason="", restarts={}, joined=Recorder.joined)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with something to run in it, which is the present one."""
    monkeypatch.setattr(run, "Supervisor", Recorder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUICOLL_SEED", raising=False)
    for name in ("x.py", "plain", "tool", "marked.py", "pkg/__main__.py", "other/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / "folder").mkdir()
    for name in ("tool", "marked.py"):
        (tmp_path / name).chmod(0o755)
    return tmp_path


def started(*arguments: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert ended.value.code in (0, None)
    return Recorder.given[0]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["x.py"], [sys.executable, "x.py"]),
        (["x.py", "-n", "3", "--", "a"], [sys.executable, "x.py", "-n", "3", "--", "a"]),
        (["--", "x.py", "-m"], [sys.executable, "x.py", "-m"]),
        (["plain"], [sys.executable, "plain"]),
        (["marked.py"], [sys.executable, "marked.py"]),
        (["pkg"], [sys.executable, "pkg"]),
        (["-m", "pkg", "-m", "x"], [sys.executable, "-m", "pkg", "-m", "x"]),
        (["-m", "json.tool", "f"], [sys.executable, "-m", "json.tool", "f"]),
        (["-n", "2", "--", "sh", "x.py", "-v"], ["sh", "x.py", "-v"]),
        (["sh", "-c", "true"], ["sh", "-c", "true"]),
    ],
)
def test_a_file_a_module_and_a_program_are_started_with_what_follows_them(
    arguments: list[str], command: list[str]
) -> None:
    assert started(*arguments) == command


def test_an_executable_file_that_is_no_python_is_a_program(here: Path) -> None:
    assert started("tool", "1") == [str(here / "tool"), "1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.py"], "there is no script at nothing.py, and no program of that name"),
        (["x"], "there is no script at x, and no program of that name; did you mean x.py?"),
        (["other"], "there is no script at other, and no program of that name; a module is run with -m other"),
        (
            ["json.tool"],
            "there is no script at json.tool, and no program of that name; a module is run with -m json.tool",
        ),
        (
            ["folder"],
            "there is no script at folder, and no program of that name; it is a directory without a __main__.py",
        ),
        (["-m", "nothing_like_it.x"], "there is no module nothing_like_it.x"),
        (["-m", "x/y"], "there is no module x/y"),
        (["-m", ".x"], "there is no module .x"),
    ],
)
def test_what_cannot_be_started_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert (ended.value.code, capsys.readouterr().err) == (2, f"quicoll: {said}\n")


def test_an_option_that_is_not_there_is_not_taken_for_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--restart", "1", "x.py"])
    assert ended.value.code == 2
    assert "No such option: --restart" in capsys.readouterr().err


def test_the_options_reach_the_supervisor_and_the_seed_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICOLL_SEED", "7")
    started("--restarts", "1", "--restart-window", "60", "--grace", "2", "x.py")
    options = Recorder.given[1]
    assert [options[name] for name in ("seed", "max_restarts", "restart_window", "grace")] == [7, 1, 60.0, 2.0]
    started("--seed", "8", "x.py")
    assert Recorder.given[1]["seed"] == 8


def test_what_an_option_needs_is_looked_for_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--metrics", "45123", "x.py"])
    assert ended.value.code == 2
    assert "prometheus_client is not installed: pip install 'quicoll[metrics]'" in capsys.readouterr().err
    assert started("--metrics", "45123", "--", "tool") == [str(Path.cwd() / "tool")]


def test_a_script_of_which_nobody_joins_ends_well_and_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started("x.py")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(Recorder, "joined", False)
    started("-n", "3", "x.py")
    assert capsys.readouterr().err == (
        "quicoll: nobody has joined job local: x.py ran as 3 processes, each by itself; does it call quicoll.join()?\n"
    )


@pytest.mark.parametrize("behind", [["-n", "3"], ["--workers=3"], ["--lr", "1", "--workers", "3"]])
def test_an_option_for_workers_behind_the_script_goes_to_it_with_a_hint(
    behind: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert started("x.py", *behind)[-len(behind) :] == behind
    said = capsys.readouterr().err
    assert "behind x.py is an argument of the script; workers are set before it: quicoll run -n N x.py" in said
    started("-n", "2", "x.py", *behind)
    assert capsys.readouterr().err == "", "who has set it before knows"
