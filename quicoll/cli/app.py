"""The commands by name. The module of a command is imported when it is asked for, and by the list of all of them.

So `quicoll certs` works without torch, and `quicoll run` does not wait for what draws plans and makes benchmarks: to
import all commands takes half a second, twice before the first worker starts.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from quicoll.cli.examples import add_examples
from quicoll.observability.logs import hear

__all__ = ["app"]

_NAMES = (
    "demo",
    "run",
    "coordinator",
    "relay",
    "scale",
    "status",
    "top",
    "bench",
    "env",
    "doctor",
    "explain",
    "sim",
    "audit",
    "post-mortem",
    "trace",
    "certs",
)
"""As the list has them. Each is a module of this package, whose `register` adds the command of its name to an app; a
hyphen of the name is an underscore of the module's."""


class _Commands(TyperGroup):
    """All commands; a module is imported when its command is.

    Ctrl-C ends a command with one line and the status that a shell gives a process which SIGINT has ended. Here,
    because versions of typer differ in both. Commands with children or a loop of their own catch it themselves.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_NAMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for name in (cmd_name,) if cmd_name in _NAMES else _NAMES:  # one that is not there may be meant for any
            if name not in self.commands:
                module = typer.Typer()
                import_module(f"quicoll.cli.{name.replace('-', '_')}").register(module)
                self.commands[name] = get_group(module).commands[name]
                add_examples(self.commands[name], name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("quicoll: ended by SIGINT", err=True)
            raise typer.Exit(128 + signal.SIGINT) from None


app = typer.Typer(
    name="quicoll",
    cls=_Commands,
    help="Deterministic collectives and atomic training steps over QUIC.",
    no_args_is_help=True,
    # A traceback with local variables would print keys.
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version("quicoll"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, help="Log what happens, to stderr; -vv: each step too.")
    ] = 0,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Log errors alone, and no warnings.")] = False,
) -> None:
    if verbose or quiet:
        level = "error" if quiet else "info" if verbose == 1 else "debug"
        os.environ.setdefault("QUICOLL_LOG", level)  # for the processes that the command starts
        hear(level)
