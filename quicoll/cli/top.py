"""`quicoll top`: a running job as a table that changes in place: who is in it, who is waited for, what is held, why."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quicoll.cli.membership_options import (
    CoordinatorOption,
    FoundJob,
    LookAsOption,
    LookCertsOption,
    RunOption,
    StalledAfterOption,
    find_job,
)
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import ConsoleDimensions, RenderableType

    from quicoll.cli.status_words import NodeRow, Picture
    from quicoll.membership.status_client import Glance

__all__ = ["drawn", "register"]

_COLOURS = {"good": "green", "wait": "yellow", "bad": "red"}
_EVENTS = 8
_LEAST_EVENTS = 3
_NAME_COLUMNS = 32


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("top")(show_job)


def show_job(
    coordinator: CoordinatorOption = None,
    certs: LookCertsOption = None,
    look_as: LookAsOption = None,
    run: RunOption = None,
    stalled_after: StalledAfterOption = None,
    interval: Annotated[float, typer.Option(min=0.25, max=3600.0, help="Seconds from one look to the next.")] = 1.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print what is seen, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object, one a line for each look, instead of a table.")
    ] = False,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve a page of the same instead, for a browser; at the loopback address unless HOST is given. "
            "Whoever reaches it may read it.",
        ),
    ] = None,
) -> None:
    """Show a running job until Ctrl-C: its state, each rank's, who is waited for, what is held and why, last events.

    Where the output is no terminal it is shown once. Nodes that somebody should look at come first. Exit status of one
    look as of `quicoll status`; else 0.
    """
    found = find_job(coordinator, certs, run)
    patience_ns = None if stalled_after is None else round(stalled_after * 1e9)
    top = _Top(found, run=run, look_as=look_as, interval=interval, timeout=timeout, patience_ns=patience_ns)
    if http is not None:
        with contextlib.suppress(KeyboardInterrupt):
            typer.echo(_serve(top, http, interval))
        return
    console = Console(highlight=False)
    if as_json:
        show: Callable[[Glance], None] = top.print_json
    else:
        show = top.printer(console)
    if once or (not as_json and not console.is_terminal):
        glance = asyncio.run(top.look_once())
        show(glance)
        raise typer.Exit(top.picture(glance).exit_status)
    with contextlib.suppress(KeyboardInterrupt):  # how one leaves it
        if as_json:
            asyncio.run(top.watch(show))
        else:
            _live(console, top)


def _serve(top: _Top, address: str, interval: float) -> str:
    """Serve the page until there is nothing to be seen any more; return why."""
    from quicoll.cli.status_page import PageServer, html_page, page_address
    from quicoll.membership.status_client import Glance

    seen = [Glance(job="?", coordinator=top.coordinator, trouble="no answer yet")]

    def show(glance: Glance) -> None:
        seen[0] = glance  # one reference, which the page's threads read

    def page() -> str:
        glance = seen[0]
        return html_page(top.latest(glance), every=interval, stale=top.stale(glance))

    server = PageServer(page_address(address), page=page, facts=lambda: top.facts(seen[0]))
    try:
        typer.echo(f"{server.url} shows the job; Ctrl-C ends it")
        return asyncio.run(top.watch(show))
    finally:
        server.close()


def _live(console: Console, top: _Top) -> None:
    """Draw in place until somebody has seen enough; the last picture stays."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def show(glance: Glance) -> None:
            picture = drawn(top.latest(glance), room=console.size, stale=top.stale(glance))
            live.update(picture, refresh=True)

        ended = asyncio.run(top.watch(show))
    console.print(ended, markup=False)


class _Top:
    """Looks at one job again and again; remembers the last status for while there is none."""

    def __init__(
        self,
        found: FoundJob,
        *,
        run: int | None,
        look_as: str | None,
        interval: float,
        timeout: float,
        patience_ns: int | None,
    ) -> None:
        self._found = found
        self._run = run
        self._look_as = look_as
        self._interval = interval
        self._timeout = timeout
        self._patience_ns = patience_ns
        self._last: tuple[float, Glance] | None = None  # when there was a status, and it

    def picture(self, glance: Glance) -> Picture:
        """What is shown of what was seen."""
        from quicoll.cli.status_words import picture_of

        return picture_of(glance, patience_ns=self._patience_ns)

    def latest(self, glance: Glance) -> Picture:
        """The same, or what was seen last where this is nothing."""
        return self.picture(glance if glance.status is not None or self._last is None else self._last[1])

    def stale(self, glance: Glance) -> str:
        """Why what is shown is old, "" where it is not."""
        if glance.status is not None or self._last is None:
            return ""
        return f"no answer for {time.monotonic() - self._last[0]:.0f} s: {glance.trouble}"

    @property
    def coordinator(self) -> str:
        """Where it is asked."""
        return self._found.coordinator

    def facts(self, glance: Glance) -> dict[str, Any]:
        """What was seen, for programs."""
        from quicoll.cli.status_words import facts_of

        return facts_of(glance, patience_ns=self._patience_ns)

    def print_json(self, glance: Glance) -> None:
        """One line."""
        typer.echo(json.dumps(self.facts(glance)))

    def printer(self, console: Console) -> Callable[[Glance], None]:
        """Return what prints a picture as it is."""
        return lambda glance: console.print(drawn(self.picture(glance)))

    async def look_once(self) -> Glance:
        """Look once."""
        from quicoll.cli.looking import watch_job

        async with watch_job(self._found, self._look_as) as watch:
            return await watch.look(self._timeout)

    async def watch(self, show: Callable[[Glance], None]) -> str:
        """Look, show it, and wait, until the `quicoll run` that it is of has ended; return that in a sentence."""
        from quicoll.cli.looking import watch_job

        async with watch_job(self._found, self._look_as) as watch:
            while True:
                began = time.monotonic()
                glance = await watch.look(self._timeout if self._last is None else max(self._interval, 1.0))
                if glance.status is not None:
                    self._last = time.monotonic(), glance
                elif self._run_has_ended():
                    return f"the `quicoll run` of job {glance.job} has ended"
                show(glance)
                await asyncio.sleep(max(0.0, began + self._interval - time.monotonic()))

    def _run_has_ended(self) -> bool:
        if not self._found.of_run:
            return False
        try:
            return find_job(None, None, self._run).coordinator != self._found.coordinator
        except LocalError:
            return True


def drawn(picture: Picture, *, room: ConsoleDimensions | None = None, stale: str = "") -> RenderableType:
    """Return a picture for a terminal.

    Args:
        picture: What is shown.
        room: The terminal that it has to fit on, a node a line; None: as many lines as it takes.
        stale: Why it is old; "" where it is not.
    """
    badge = (f" {picture.condition.upper()} ", f"bold reverse {_COLOURS[picture.grade]}")
    head = [Text(stale, style="bold red")] if stale else []
    head.append(Text.assemble(badge, " ", (picture.headline, "bold")))
    head += [Text(f"  {line}") for line in picture.lines]
    shown, events = picture.rows, picture.events[:_EVENTS]
    if room is not None:
        # A text that is broken at a word may take a line more than it has characters for.
        taken = sum(-(-text.cell_len // room.width) + (text.cell_len > room.width) for text in head)
        left = room.height - taken - 5  # two empty lines, the table's head, who is not shown, and the cursor's line
        events = events[: max(_LEAST_EVENTS, left - len(shown))]
        shown = shown[: max(0, left - len(events))]
    parts: list[RenderableType] = [*head]
    if shown:
        parts += [Text(""), _table(shown, whole=room is None)]
    hidden = len(picture.rows) - len(shown) + picture.unlisted
    if hidden:
        parts.append(Text(f"  and {hidden} more nodes", style="dim"))
    if events:
        parts.append(Text(""))
        wide = max(len(ago) for ago, _ in events)
        for ago, said in events:
            line = Text(f"  {ago:>{wide}} ago  {said}", style="dim", overflow="ellipsis", no_wrap=room is not None)
            parts.append(line)
    return Group(*parts)


def _table(rows: tuple[NodeRow, ...], *, whole: bool) -> Table:
    """One row for each node. whole: whether a note may take several lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("  RANK", justify="right", no_wrap=True)
    table.add_column("NODE", no_wrap=True, overflow="ellipsis", max_width=_NAME_COLUMNS)
    table.add_column("STATE", no_wrap=True)
    table.add_column("STEP", justify="right", no_wrap=True)
    table.add_column("ROUND TRIP", justify="right", no_wrap=True)
    # The ratio makes it the one column that gives way: rich would take of all that must not be wrapped.
    table.add_column("", ratio=1, no_wrap=not whole, overflow="fold" if whole else "ellipsis")
    for row in rows:
        state = Text(row.state, style="bold red" if row.troubled else "")
        rank = f"! {row.rank:>4}" if row.troubled else row.rank
        table.add_row(rank, Text(row.node), state, row.step, row.rtt, Text(row.note))
    return table
