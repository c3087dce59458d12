"""The commands by name. A command imports what it needs when it runs: `quicoll certs` works without torch."""

from __future__ import annotations

import signal
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quicoll.cli import audit, bench, certs, coordinator, demo, doctor, env, explain, relay, run, scale, sim

__all__ = ["app"]


class _Commands(TyperGroup):
    """Ctrl-C ends a command with one line and the status that a shell gives a process which SIGINT has ended.

    Here, because versions of typer differ in both. Commands with children or a loop of their own catch it themselves.
    """

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
    add_completion=False,
    # A traceback with local variables would print keys.
    pretty_exceptions_enable=False,
)
app.add_typer(audit.audit_app, name="audit")
app.add_typer(certs.certs_app, name="certs")
for command in (demo, run, coordinator, relay, scale, bench, env, doctor, explain, sim):
    command.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version("quicoll"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
