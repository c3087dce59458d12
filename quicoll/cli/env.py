"""`quicoll env`: each setting of a rank, as it would be taken here, and where it comes from."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from quicoll.config import Config
from quicoll.rendezvous.meeting import meets

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("env")(env)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Print the settings that `quicoll.join()` takes in this environment, with the source of each."""
    named = Config.named()
    meeting = meets(named, os.environ)
    config = named if meeting else Config.resolve()
    values = {name: (getattr(config, name), source) for name, source in config.sources.items()}
    if meeting:  # what is agreed then is not known here
        values["coordinator"] = values["certs"] = (None, "agreed when the ranks meet")
        if not config.listen:
            values["listen"] = (None, "route to the coordinator")
    if as_json:
        typer.echo(json.dumps({name: {"value": value, "source": source} for name, (value, source) in values.items()}))
        return
    width = max(map(len, values))
    for name, (value, source) in values.items():
        typer.echo(f"{name:<{width}} {'-' if value is None else value!s:<28} {source}")
