"""Writes docs/commands.md, the reference of the command line, from the parser itself: `make docs`, or

    python docs/commands_page.py

tests/unit/test_site.py holds the page to what this makes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import typer
from typer.main import get_command
from typer.models import ArgumentInfo, OptionInfo

from quicoll.cli.app import app
from quicoll.cli.examples import EXAMPLES

PAGE = Path(__file__).parent / "commands.md"
HEAD = """# Commands

<!-- Made by docs/commands_page.py from the parser; do not edit. -->

`quicoll COMMAND --help` prints the same. What each exit status means: [settings.md](settings.md#exit-statuses). Where a
variable is named beside an option, it is taken when the option is not given.

`quicoll --install-completion` has your shell (bash, zsh, fish, PowerShell) complete commands and options from its next
start on; `quicoll --show-completion` prints what it would add, for those who keep such files by hand.

A word means the same everywhere: `--workers` are processes that `quicoll` starts to train, `--ranks` the members of a
group, `--world-size` those that the first view of a job waits for. `--json` gives findings to programs, on stdout or,
where it names a file, in that; `--plot` draws them into a file. `--certs` is a directory of certificates.
"""


def page() -> str:
    """The whole page."""
    root: Any = get_command(app)
    parts = [HEAD, *_declared("quicoll", root.callback, "COMMAND")]
    for name in root.list_commands(None):
        parts += _command(f"quicoll {name}", root.get_command(None, name), level=2)
    return "\n".join(parts)


def _command(path: str, command: Any, *, level: int) -> Iterator[str]:
    yield f"{'#' * level} {path}\n"
    yield _text(inspect.cleandoc(command.help or "")) + "\n"
    inner = getattr(command, "commands", None)
    if inner is not None:
        for name in sorted(inner):
            yield from _command(f"{path} {name}", inner[name], level=level + 1)
        return
    yield from _declared(path, command.callback)
    yield from _examples(path.removeprefix("quicoll "))


def _examples(name: str) -> Iterator[str]:
    if name in EXAMPLES:
        yield "```text\n" + "\n".join(EXAMPLES[name]) + "\n```\n"


def _declared(path: str, callback: Any, rest: str = "") -> Iterator[str]:
    # What the functions declare, and not what typer keeps of it, which is its own affair and differs by version.
    function = inspect.unwrap(callback)
    given = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [Declared.read(each) for each in given if each.annotation is not typer.Context]
    given = [each for each in parameters if isinstance(each.info, ArgumentInfo)]
    options = [each for each in parameters if isinstance(each.info, OptionInfo) and not each.info.hidden]
    words = "".join(f" {each.names}" for each in given) + (f" {rest}" if rest else "")
    yield f"```text\n{path}{' [OPTIONS]' if options else ''}{words}\n```\n"
    rows = [f"| {_in_table(_code(each.names))} | {_in_table(each.said)} |" for each in (*given, *options)]
    if rows:
        yield "| | |\n|---|---|\n" + "\n".join(rows) + "\n"


@dataclass(frozen=True)
class Declared:
    """A parameter of a command, as its function declares it."""

    name: str
    kind: Any
    default: Any
    info: Any

    @classmethod
    def read(cls, parameter: inspect.Parameter) -> Declared:
        kind, info = get_args(parameter.annotation)
        kinds = [each for each in get_args(kind) if each is not type(None)]
        if isinstance(kind, UnionType) and len(kinds) == 1:
            (kind,) = kinds
        return cls(parameter.name, kind, parameter.default, info)

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def names(self) -> str:
        several = get_origin(self.kind) is list
        if isinstance(self.info, ArgumentInfo):
            name = (self.info.metavar or self.name.upper()) + ("..." if several else "")
            return name if self.required else f"[{name}]"
        # Within Annotated the first of the names stands where the default would be.
        told = [self.info.default] if isinstance(self.info.default, str) else []
        names = [*told, *(self.info.param_decls or ())]
        if not names:
            name = self.name.replace("_", "-")
            names = [f"--{name}/--no-{name}" if self.kind is bool else f"--{name}"]
        shown = ", ".join(sorted(names, key=len)).replace("/", " / ")
        return shown if self.kind is bool or self.info.count else f"{shown} {self._value()}"

    def _value(self) -> str:
        if self.info.metavar:
            return str(self.info.metavar)
        if get_origin(self.kind) is Literal:
            return "|".join(map(str, get_args(self.kind)))
        kind = get_args(self.kind)[0] if get_origin(self.kind) is list else self.kind
        return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")

    @property
    def said(self) -> str:
        parts = [_text(" ".join((self.info.help or "").split()))]
        low, high = self.info.min, self.info.max
        if low is not None or high is not None:
            parts.append(
                f"At least {low:,}."
                if high is None
                else f"At most {high:,}."
                if low is None
                else f"{low:,} to {high:,}."
            )
        if isinstance(self.info.show_default, str):
            parts.append(f"Default: {_text(self.info.show_default)}.")
        elif self.required:
            parts.append("Required.")
        elif self.info.show_default and not self.info.count and self.default not in (None, False, ""):
            parts.append(f"Default: {_code('on' if self.default is True else str(self.default))}.")
        if self.info.envvar:
            parts.append(f"Variable: {_code(str(self.info.envvar))}.")
        return " ".join(part for part in parts if part)


def _in_table(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`"


def _text(text: str) -> str:
    """Help is plain text with code in backticks: a star or an angle bracket outside of them is itself."""
    return "`".join(part if at % 2 else re.sub(r"([*<_])", r"\\\1", part) for at, part in enumerate(text.split("`")))


if __name__ == "__main__":
    PAGE.write_text(page())
