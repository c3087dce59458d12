"""Options that several commands have: of `quicoll coordinator` and `quicoll run`, who may take part, how many, how long
votes take, and the job's seed; of those that ask a running job for something, which one that is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from quicoll.checks import MAX_MEMBERS, MAX_WHOLE

__all__ = [
    "CoordinatorOption",
    "FoundJob",
    "LookAsOption",
    "LookCertsOption",
    "MaxWorldSizeOption",
    "MinWorldSizeOption",
    "NodesOption",
    "RunOption",
    "SeedOption",
    "StalledAfterOption",
    "VoteTimeoutOption",
    "WarmSparesOption",
    "coordinator_options",
    "find_job",
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

CoordinatorOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        envvar="QUICOLL_COORDINATOR",
        help="The coordinator's address; of several that take over from each other, with commas between them.",
        show_default="that of the one `quicoll run` of this user",
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option(
        metavar="PID|JOB", help="Process, or job, of the `quicoll run` that is meant, where there are several."
    ),
]
LookCertsOption = Annotated[
    Path | None,
    typer.Option(
        envvar="QUICOLL_CERTS",
        help="Directory with the certificate to look with.",
        show_default="that of the one `quicoll run` of this user",
    ),
]
LookAsOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="ROLE/NAME",
        help="The certificate to look with, of a reader or an operator.",
        show_default="reader/reader, or else operator/operator",
    ),
]
StalledAfterOption = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Seconds for which a step may be open, or a view be formed, until the job counts as stalled.",
        show_default="ten times the usual step, at least 30; 300 before steps are known",
    ),
]


class FoundJob(NamedTuple):
    """How a running job is reached. of_run: whether that was found in the files of a `quicoll run`."""

    coordinator: str
    certs: Path
    of_run: bool


def find_job(coordinator: str | None, certs: Path | None, run: str | None) -> FoundJob:
    """Return how the job is reached that these options name.

    Args:
        coordinator: As given; None takes that of a `quicoll run` here.
        certs: Likewise.
        run: Which one.
    Raises:
        LocalError: There is none here, or there are several.
    """
    from quicoll.launch.running import find_run

    if coordinator is not None and certs is not None:
        return FoundJob(coordinator, certs, of_run=False)
    found = find_run(run)
    return FoundJob(coordinator or found.coordinator, certs or found.certs, of_run=coordinator is None)


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
