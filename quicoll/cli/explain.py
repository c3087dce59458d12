"""`quicoll explain`: what a collective does, what it costs by the model, and a picture of it.

    quicoll explain all_reduce --world 6 --bytes 64MiB --algorithm hierarchical --sites 3,3

The plans are those that a group would run, of float32 elements. Nothing is sent.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from quicoll import plan
from quicoll.errors import LocalError
from quicoll.plan.cost import Forecast, Network, choose, limit, predict
from quicoll.plan.picture import draw

__all__ = ["plans_of", "register", "size_of"]

_ITEM = 4
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SCHEDULE_LINES = 12  # of each rank, unless --full


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("explain")(explain)


def explain(
    collective: Annotated[
        str,
        typer.Argument(help="all_reduce, reduce, reduce_scatter, all_gather, broadcast, gather, scatter, ..."),
    ],
    world: Annotated[int, typer.Option(help="Number of ranks.", min=1, max=256)] = 4,
    nbytes: Annotated[
        str, typer.Option("--bytes", help="Of the tensor; of all_gather and gather, of the result. 64MiB, 10k, 1000.")
    ] = "64MiB",
    algorithm: Annotated[str, typer.Option(help="Of a reduction; auto: the cheapest by the model.")] = "auto",
    sites: Annotated[
        str, typer.Option(help="Ranks on each site, as 3,3. All on one by default.", show_default=False)
    ] = "",
    leaves: Annotated[
        int | None, typer.Option(help="Logical shards of a reduction; by default one a rank.", show_default=False)
    ] = None,
    root: Annotated[int, typer.Option(help="Root, or the receiver of send.")] = 0,
    chunk_bytes: Annotated[str, typer.Option(help="The longest message.")] = "1MiB",
    rtt_ms: Annotated[float, typer.Option(help="Round trip within a site, milliseconds.")] = 0.2,
    mbit: Annotated[float, typer.Option(help="Rate of a path within a site, Mbit/s.")] = 1000.0,
    far_rtt_ms: Annotated[float, typer.Option(help="Round trip between sites, milliseconds.")] = 50.0,
    far_mbit: Annotated[float, typer.Option(help="Rate of the path between two sites, Mbit/s, shared.")] = 200.0,
    svg: Annotated[
        Path | None, typer.Option(help="Draw it into this file: ranks, messages, time.", show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print every step of every rank.")] = False,
) -> None:
    """Print what each rank does in a collective, what it costs by the model, and what its alternatives cost."""
    try:
        where = _sites(sites, world)
        total, chunk, shards = size_of(nbytes), size_of(chunk_bytes), world if leaves is None else leaves
        network = Network.between(
            where,
            latency=rtt_ms / 2e3,
            rate=mbit * 1e6 / 8,
            far_latency=far_rtt_ms / 2e3,
            far_rate=far_mbit * 1e6 / 8,
        )
        known = plan.ALGORITHMS.get(collective, ())
        if algorithm not in ("auto", *known):
            raise LocalError(f"algorithm {algorithm!r} of {collective} is not known; use auto{_or(known)}")
        taken = algorithm
        if algorithm == "auto":
            taken = choose(collective, world, total, shards, where, network, chunk_bytes=chunk) if known else ""
        plans = plans_of(collective, taken, world, total, shards, where, root, chunk)
        forecast = predict(plans, network)
    except LocalError as error:
        raise typer.BadParameter(str(error)) from error
    _print_schedule(plans, full=full)
    lowest = limit(collective, total, network)
    typer.echo("")
    typer.echo(f"predicted     {_ms(forecast.seconds)}   (messages of 100 us at each end; no loss, no other traffic)")
    typer.echo(f"limit         {_ms(lowest)}   {_formula(collective)}, B the fastest port, with its delays")
    _print_traffic(forecast, network)
    if known:
        typer.echo("")
        _print_table(collective, known, taken, world, total, shards, where, root, chunk, network)
    if svg is not None:
        notes = [f"predicted {_ms(forecast.seconds).strip()}, limit {_ms(lowest).strip()}"]
        svg.write_text(draw(forecast, network, title=plans[0].signature, notes=notes), encoding="utf-8")
        typer.echo(f"\ndrawn to {svg}")


def plans_of(
    collective: str, algorithm: str, world: int, nbytes: int, leaves: int, sites: tuple[int, ...], root: int, chunk: int
) -> list[plan.Plan]:
    """The plans of all ranks, for `nbytes` bytes of float32. Raises LocalError."""
    elements = -(-nbytes // _ITEM)
    rows = [elements // world + (rank < elements % world) for rank in range(world)]
    sized: dict[str, Any] = {"itemsize": _ITEM, "chunk_bytes": chunk}
    reducing: dict[str, Any] = {
        "algorithm": algorithm,
        "leaves": leaves,
        "wide_itemsize": _ITEM,
        "sites": sites,
        **sized,
    }
    arguments: dict[str, dict[str, Any]] = {
        "all_reduce": {"elements": elements, **reducing},
        "reduce": {"elements": elements, "root": root, **reducing},
        "reduce_scatter": {"counts": rows, **reducing},
        "all_gather": {"counts": rows, **sized},
        "gather": {"counts": rows, "root": root, **sized},
        "scatter": {"counts": rows, "root": root, **sized},
        "all_to_all": {"counts": [[-(-row // world) for _ in range(world)] for row in rows], **sized},
        "broadcast": {"elements": elements, "root": root, **sized},
        "send": {"elements": elements, "source": (root + 1) % world, "to": root, **sized},
        "barrier": {},
    }
    if collective not in arguments:
        raise LocalError(f"collective {collective!r} is not known; use one of {', '.join(arguments)}")
    planner = getattr(plan, collective)
    return [planner(rank=rank, world=world, **arguments[collective]) for rank in range(world)]


def size_of(text: str) -> int:
    """Bytes of "1000", "10k", "64MiB" or "1.5 GB"; all units are powers of two. Raises LocalError."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if found is None:
        raise LocalError(f"{text!r} is no size; use 1000, 10k, 64MiB")
    return round(float(found[1]) * _UNITS[found[2].upper()])


def _sites(text: str, world: int) -> tuple[int, ...]:
    if not text:
        return (0,) * world
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        raise LocalError(f"{text!r} are no sites; use the ranks on each, as 3,3") from None
    if min(counts) < 1 or sum(counts) != world:
        raise LocalError(f"sites of {text} ranks make {sum(counts)}, the world has {world}")
    return tuple(site for site, count in enumerate(counts) for _ in range(count))


def _print_schedule(plans: list[plan.Plan], *, full: bool) -> None:
    typer.echo(plans[0].signature)
    for made in plans:
        lines = made.describe().splitlines()[1:]
        shown = lines if full else lines[:_SCHEDULE_LINES]
        typer.echo("")
        for line in shown:
            typer.echo(line)
        if len(lines) > len(shown):
            typer.echo(f"  ... {len(lines) - len(shown)} more lines (--full)")


def _print_traffic(forecast: Forecast, network: Network) -> None:
    typer.echo(f"messages      {len(forecast.flights)}")
    typer.echo(f"busiest rank  {_mib(forecast.busiest)} one way")
    if max(network.sites) > 0:
        typer.echo(f"between sites {_mib(forecast.crossing)}, both ways together")


def _print_table(
    collective: str,
    known: tuple[str, ...],
    taken: str,
    world: int,
    total: int,
    shards: int,
    where: tuple[int, ...],
    root: int,
    chunk: int,
    network: Network,
) -> None:
    typer.echo(f"{'algorithm':<14}{'predicted':>12}{'messages':>10}{'busiest rank':>16}{'between sites':>16}")
    for name in known:
        if name == "exchange" and total > 1 << 20 and name != taken:
            typer.echo(f"{name:<14}{'-':>12}   not for tensors of more than 1 MiB")
            continue
        forecast = predict(plans_of(collective, name, world, total, shards, where, root, chunk), network)
        mark = " *" if name == taken else ""
        typer.echo(
            f"{name:<14}{_ms(forecast.seconds):>12}{len(forecast.flights):>10}{_mib(forecast.busiest):>16}"
            f"{_mib(forecast.crossing):>16}{mark}"
        )


def _formula(collective: str) -> str:
    return {
        "all_reduce": "2 (N - 1) / N * S / B + 2 delays",
        "reduce": "S / B + 1 delay",
        "broadcast": "S / B + 1 delay",
        "send": "S / B + 1 delay",
        "barrier": "1 delay",
    }.get(collective, "(N - 1) / N * S / B + 1 delay")


def _or(known: tuple[str, ...]) -> str:
    return f", {', '.join(known)}" if known else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.2f} MiB" if nbytes >= 1 << 20 else f"{nbytes} B"
