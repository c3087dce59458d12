"""Examples in the help: every command has some, and each is a line that the parser takes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from quicoll.cli.app import app
from quicoll.cli.examples import EXAMPLES

ROOT: Any = get_command(app)


def commands() -> Iterator[tuple[str, Any]]:
    """All of them by name, those in groups too."""
    for name in ROOT.list_commands(None):
        command = ROOT.get_command(None, name)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {each}", inner[each]) for each in sorted(inner))


def test_every_command_has_examples_and_there_are_none_of_others() -> None:
    assert sorted(EXAMPLES) == sorted(name for name, _ in commands())


def test_every_command_has_its_findings_as_json() -> None:
    """One word for it in all of them: a flag, or a file where the command has something else to say on stdout."""
    without = [name for name, command in commands() if "--json" not in {o for p in command.params for o in p.opts}]
    assert without == []


# Words that were in use for these once, in one command or another.
ONE_WORD = {"--ranks": {"--world"}, "--plot": {"--svg"}, "--processes": {"--jobs"}}


def test_no_command_has_another_word_for_what_the_others_have_a_word_for() -> None:
    named = {option for _, command in commands() for each in command.params for option in each.opts}
    assert named >= ONE_WORD.keys()
    assert sorted(named & set().union(*ONE_WORD.values())) == []


def test_an_option_of_one_name_is_a_flag_in_all_commands_or_in_none() -> None:
    kinds: dict[str, set[bool]] = {}
    for _, command in commands():
        for each in command.params:
            for option in each.opts:
                if option.startswith("--"):
                    kinds.setdefault(option, set()).add(bool(getattr(each, "is_flag", False)))
    # `--json` is a file where stdout is taken by something else.
    assert sorted(option for option, found in kinds.items() if len(found) > 1) == ["--json"]


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_is_a_line_that_the_parser_takes(line: str) -> None:
    (name,) = (name for name, lines in EXAMPLES.items() if line in lines)
    program, *words = shlex.split(line)
    depth = len(name.split())
    assert (program, " ".join(words[:depth])) == ("quicoll", name)
    dict(commands())[name].make_context(name, words[depth:])


def test_the_help_of_a_command_ends_with_its_examples_a_line_each() -> None:
    said = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, ["certs", "issue", "--help"]).output
    lines = [line.strip() for line in said.splitlines()]
    assert [line for line in lines if line.startswith("quicoll certs issue")] == list(EXAMPLES["certs issue"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "found"), [("quicoll st", {"status"}), ("quicoll certs is", {"issue"}), ("quicoll top --on", {"--once"})]
)
def test_a_shell_completes_commands_and_options(words: str, found: set[str]) -> None:
    environment = {
        **os.environ,
        "_QUICOLL_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "quicoll.cli.main"], env=environment, capture_output=True, text=True, check=False
    )
    assert set(done.stdout.split()) == found, done.stderr
