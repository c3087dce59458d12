"""Options of `quicoll coordinator` that `quicoll run` has too: who may take part, how many,
how long votes take, and the job's seed."""

from __future__ import annotations

from typing import Annotated

import typer

from quicoll.checks import MAX_MEMBERS, MAX_WHOLE

__all__ = [
    "MaxWorldSizeOption",
    "MinWorldSizeOption",
    "NodesOption",
    "SeedOption",
    "VoteTimeoutOption",
    "WarmSparesOption",
    "coordinator_options",
    "node_patterns",
]

NodesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Who may join: names or patterns (gpu-*), separated by commas; again for more. Else every certified node.",
        show_default=False,
    ),
]
MinWorldSizeOption = Annotated[int, typer.Option(min=1, max=MAX_MEMBERS, help="Least members of every view.")]
MaxWorldSizeOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_MEMBERS,
        help="Most members of every view; further nodes stand by and replace lost ones.",
        show_default="no bound",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        min=0, max=MAX_WHOLE, envvar="QUICOLL_SEED", help="The job's seed; else the journal's, or a drawn one."
    ),
]
VoteTimeoutOption = Annotated[
    float | None,
    typer.Option(
        help="Seconds from the first vote for a step to the last; late ones are left out. "
        "Ranks whose own timeouts contradict it are refused.",
        show_default="300, and refuses nobody",
    ),
]

WarmSparesOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_MEMBERS,
        help="How many of the nodes that stand by are kept warm: ready to take a lost rank's place at once.",
    ),
]


def node_patterns(given: list[str] | None) -> tuple[str, ...]:
    """Return the names and patterns of `--nodes`."""
    return tuple(name.strip() for names in given or () for name in names.split(",") if name.strip())


def coordinator_options(
    nodes: list[str] | None,
    min_world_size: int,
    max_world_size: int | None,
    vote_timeout: float | None,
    *,
    warm_spares: int = 0,
) -> list[str]:
    """Return the options of `quicoll coordinator` that say the same."""
    options = [option for name in node_patterns(nodes) for option in ("--nodes", name)]
    if min_world_size != 1:
        options += ["--min-world-size", str(min_world_size)]
    if max_world_size is not None:
        options += ["--max-world-size", str(max_world_size)]
    if warm_spares:
        options += ["--warm-spares", str(warm_spares)]
    return options if vote_timeout is None else [*options, "--vote-timeout", str(vote_timeout)]
