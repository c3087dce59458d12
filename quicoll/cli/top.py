"""`quicoll top`: a running job as tables that change in place: who is in it, who is waited for and why, its links."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

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

    from rich.console import ConsoleDimensions, ConsoleOptions, RenderableType, RenderResult

    from quicoll.cli.link_words import LinkRow
    from quicoll.cli.status_words import NodeRow, Picture
    from quicoll.membership.status_client import Glance

__all__ = ["ShownLinks", "drawn", "register"]

_COLOURS = {"good": "green", "wait": "yellow", "bad": "red"}
_EVENTS = 8
_LEAST_EVENTS = 3
_NAME_COLUMNS = 32
_END_COLUMNS = 20
"""Of the names at both ends of a link, where a terminal has no more."""
_WIDE: Final = 104
"""Columns from which on a terminal has all of a link."""
_WORST: Final = 10
_WORST_OF_PAGE: Final = 20
_LEAST_LINKS: Final = 3
_ROUND_LINKS: Final = 3
"""Lines around the rows of links: an empty one, the head, who is not shown or not known."""


class ShownLinks(StrEnum):
    """Which links are shown."""

    WORST = "worst"
    ALL = "all"
    NONE = "none"


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
    links: Annotated[
        ShownLinks,
        typer.Option(
            metavar="worst|all|none",
            help=f"Links between ranks: those that fit the screen, {_WORST} without one; or all of them, before other "
            "lines; or none. --json has all in any case.",
        ),
    ] = ShownLinks.WORST,
) -> None:
    """Show a running job until Ctrl-C: its state, each rank's, who is waited for, what is held and why, links, events.

    Where the output is no terminal it is shown once. Nodes that somebody should look at come first, and so do the links
    that lose most. Exit status of one look as of `quicoll status`; else 0.
    """
    found = find_job(coordinator, certs, run)
    patience_ns = None if stalled_after is None else round(stalled_after * 1e9)
    top = _Top(
        found,
        run=run,
        look_as=look_as,
        interval=interval,
        timeout=timeout,
        patience_ns=patience_ns,
        links=ShownLinks.ALL if as_json else links,
    )
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

    def page(most_links: int | None) -> str:
        glance = seen[0]
        return html_page(top.latest(glance), every=interval, stale=top.stale(glance), most_links=most_links)

    most = {ShownLinks.ALL: None, ShownLinks.WORST: _WORST_OF_PAGE, ShownLinks.NONE: 0}[top.links]
    server = PageServer(
        page_address(address),
        page=lambda: page(most),
        all_links=lambda: page(None),
        facts=lambda: top.facts(seen[0]),
    )
    try:
        typer.echo(f"{server.url} shows the job; Ctrl-C ends it")
        return asyncio.run(top.watch(show))
    finally:
        server.close()


def _live(console: Console, top: _Top) -> None:
    """Draw in place until somebody has seen enough; the last picture stays."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def show(glance: Glance) -> None:
            picture = drawn(top.latest(glance), room=console.size, stale=top.stale(glance), links=top.links)
            live.update(picture, refresh=True)

        ended = asyncio.run(top.watch(show))
    console.print(ended, markup=False)


class _Top:
    """Looks at one job again and again; remembers the last status for while there is none."""

    def __init__(
        self,
        found: FoundJob,
        *,
        run: str | None,
        look_as: str | None,
        interval: float,
        timeout: float,
        patience_ns: int | None,
        links: ShownLinks,
    ) -> None:
        self._found = found
        self._run = run
        self._look_as = look_as
        self._interval = interval
        self._timeout = timeout
        self._patience_ns = patience_ns
        self.links = links
        self._last: tuple[float, Glance] | None = None  # when there was a status, and it

    def picture(self, glance: Glance) -> Picture:
        """What is shown of what was seen."""
        from quicoll.cli.status_words import picture_of

        return picture_of(glance, patience_ns=self._patience_ns, links=self._asks)

    def latest(self, glance: Glance) -> Picture:
        """The same, or what was seen last where this is nothing."""
        return self.picture(glance if glance.status is not None or self._last is None else self._last[1])

    def stale(self, glance: Glance) -> str:
        """Why what is shown is old, "" where it is not."""
        if glance.status is not None or self._last is None:
            return ""
        return f"no answer for {time.monotonic() - self._last[0]:.0f} s: {glance.trouble}"

    @property
    def _asks(self) -> bool:
        return self.links is not ShownLinks.NONE

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
        return lambda glance: console.print(drawn(self.picture(glance), links=self.links))

    async def look_once(self) -> Glance:
        """Look once."""
        from quicoll.cli.looking import watch_job

        async with watch_job(self._found, self._look_as) as watch:
            return await watch.look(self._timeout, links=self._asks)

    async def watch(self, show: Callable[[Glance], None]) -> str:
        """Look, show it, and wait, until the `quicoll run` that it is of has ended; return that in a sentence."""
        from quicoll.cli.looking import watch_job

        async with watch_job(self._found, self._look_as) as watch:
            while True:
                began = time.monotonic()
                timeout = self._timeout if self._last is None else max(self._interval, 1.0)
                glance = await watch.look(timeout, links=self._asks)
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


def drawn(
    picture: Picture,
    *,
    room: ConsoleDimensions | None = None,
    stale: str = "",
    links: ShownLinks = ShownLinks.WORST,
) -> RenderableType:
    """Return a picture for a terminal.

    Args:
        picture: What is shown.
        room: The terminal that it has to fit on, a node or link a line; None: as many lines as it takes.
        stale: Why it is old; "" where it is not.
        links: Which of its links.
    """
    badge = (f" {picture.condition.upper()} ", f"bold reverse {_COLOURS[picture.grade]}")
    head = [Text(stale, style="bold red")] if stale else []
    head.append(Text.assemble(badge, " ", (picture.headline, "bold")))
    head += [Text(f"  {line}") for line in picture.lines]
    shown, events = picture.rows, picture.events[:_EVENTS]
    worst = picture.links if links is ShownLinks.ALL else picture.links[: _WORST if links is ShownLinks.WORST else 0]
    if room is not None:
        # A text that is broken at a word may take a line more than it has characters for.
        taken = sum(-(-text.cell_len // room.width) + (text.cell_len > room.width) for text in head)
        left = room.height - taken - 5  # two empty lines, the table's head, who is not shown, and the cursor's line
        worst = picture.links[: _lines_of_links(picture, links, left)]
        left -= len(worst) + _ROUND_LINKS if worst else 0
        events = events[: max(_LEAST_EVENTS, left - len(shown))]
        shown = shown[: max(0, left - len(events))]
    parts: list[RenderableType] = [*head]
    if shown:
        parts += [Text(""), _table(shown, whole=room is None)]
    hidden = len(picture.rows) - len(shown) + picture.unlisted
    if hidden:
        parts.append(Text(f"  and {hidden} more nodes", style="dim"))
    if links is not ShownLinks.NONE:
        parts += _links(picture, worst, room)
    if events:
        parts.append(Text(""))
        wide = max(len(ago) for ago, _ in events)
        for ago, said in events:
            line = Text(f"  {ago:>{wide}} ago  {said}", style="dim", overflow="ellipsis", no_wrap=room is not None)
            parts.append(line)
    return Group(*parts)


def _lines_of_links(picture: Picture, links: ShownLinks, left: int) -> int:
    """Return how many links have room. left: lines for nodes, links and events."""
    if links is ShownLinks.NONE:
        return 0
    troubled = sum(row.troubled for row in picture.rows)
    if links is ShownLinks.ALL:
        free = left - _ROUND_LINKS - _LEAST_EVENTS - max(1, troubled)
    else:
        free = left - _ROUND_LINKS - min(_LEAST_EVENTS, len(picture.events)) - len(picture.rows)
        free = max(free, left // 2 - _ROUND_LINKS)  # where there are more nodes than lines they leave links half
    return free if free >= _LEAST_LINKS else 0


def _links(picture: Picture, shown: tuple[LinkRow, ...], room: ConsoleDimensions | None) -> list[RenderableType]:
    """The links that are shown, how many are not, and whose are not known, which is a line."""
    parts: list[RenderableType] = [Text(""), _LinkTable(shown, whole=room is None)] if shown else []
    hidden = len(picture.links) - len(shown) + picture.untold
    notes = [f"and {hidden} more links"] if hidden and shown else []
    notes += [picture.unknown] if picture.unknown else []
    if notes:
        parts.append(Text(f"  {'; '.join(notes)}", style="dim", overflow="ellipsis", no_wrap=room is not None))
    return parts


class _LinkTable:
    """One row for each link, in as many columns as there is room for. whole: whether a note may take several lines."""

    def __init__(self, rows: tuple[LinkRow, ...], *, whole: bool) -> None:
        self._rows = rows
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it."""
        from quicoll.cli.link_words import LESSER_COLUMNS, LINK_COLUMNS

        width = options.max_width
        left_out = LESSER_COLUMNS if width < _WIDE else ()
        shown = [place for place, name in enumerate(LINK_COLUMNS) if name not in left_out]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=True)
        names = max(_END_COLUMNS, min(_NAME_COLUMNS, width // 5))
        for name in LINK_COLUMNS[:2]:
            table.add_column(f"  {name.upper()}", no_wrap=True, overflow="ellipsis", max_width=names)
        for place in shown[2:-1]:
            table.add_column(LINK_COLUMNS[place].upper(), justify="right", no_wrap=True)
        table.add_column("", ratio=1, no_wrap=not self._whole, overflow="fold" if self._whole else "ellipsis")
        for row in self._rows:
            cells = [Text(row.cells[place]) for place in shown]
            cells[0] = Text(f"! {row.node}" if row.troubled else f"  {row.node}", style="bold red" * row.troubled)
            cells[1] = Text(f"  {row.peer}")
            table.add_row(*cells)
        yield table


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
