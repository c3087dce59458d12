"""`quicoll explain`: the cost of a collective by the model, its steps, and a picture of it.

    quicoll explain all_reduce --ranks 6 --bytes 64MiB --algorithm hierarchical --sites 3,3
    quicoll explain all_reduce --ranks 8 --bytes 16MiB --leaves 32 --exact
    quicoll explain all_reduce --ranks 4 --bytes 64MiB --wire int8

The plans are those that a group would run: both come from `quicoll.plan.schedule`. Nothing is sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from quicoll import plan
from quicoll.collectives.base import even_rows
from quicoll.errors import LocalError
from quicoll.numerics.dtypes import DTYPES
from quicoll.numerics.reduce import Precision, ReduceOp
from quicoll.plan.forecast import Forecast, limit, predict
from quicoll.plan.network import FAR, NEAR, NetworkModel, messages
from quicoll.plan.picture import draw
from quicoll.plan.schedule import (
    ElementFormat,
    Schedule,
    element_format,
    move,
    reduction,
    require_gathering,
    require_ring_options,
)

__all__ = ["ExplainedCall", "register", "size_of"]

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SCHEDULE_LINES = 12  # of each rank, unless --full
_SCHEDULE_RANKS = 8  # likewise
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_MOVES = ("all_gather", "broadcast", "gather", "scatter", "all_to_all", "send", "barrier")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("explain")(explain)


@dataclass(frozen=True, slots=True)
class ExplainedCall:
    """A call with what its group adds to it.

    nbytes: of the tensor that a rank gives; of all_gather and gather, of the result. Rows, where they are divided, are
    single elements, divided as the call divides them by default. algorithm: "ring" stands for reduce_order="ring".
    """

    collective: str
    _: KW_ONLY
    world: int
    nbytes: int
    algorithm: str = "auto"
    sites: tuple[int, ...] = ()
    dtype: str = "float32"
    leaves: int | None = None
    op: str = "sum"
    precision: Precision = "default"
    wire: str | None = None
    root: int = 0
    chunk_bytes: int = plan.MIB

    @property
    def elements(self) -> int:
        return -(-self.nbytes // DTYPES[self.dtype].itemsize)

    @property
    def total(self) -> int:
        """Leaves of a reduction."""
        return self.world if self.leaves is None else self.leaves

    def check(self) -> None:
        """Raise LocalError for what no call could ask for."""
        if self.collective not in (*_REDUCTIONS, *_MOVES):
            names = ", ".join((*_REDUCTIONS, *_MOVES))
            raise LocalError(f"collective {self.collective!r} is not known; use one of {names}")
        known = plan.ALGORITHMS.get(self.collective, ())
        if self.algorithm not in ("auto", *known):
            names = ", ".join(("auto", *known))
            raise LocalError(f"algorithm {self.algorithm!r} of {self.collective} is not known; use {names}")
        if self.dtype not in DTYPES:
            raise LocalError(f"dtype {self.dtype!r} is not known; use one of {', '.join(DTYPES)}")
        if self.collective not in _REDUCTIONS and (self.precision != "default" or self.wire is not None):
            raise LocalError(f"{self.collective} computes nothing: leave precision and wire out")
        if self.wire is not None and self.collective != "all_reduce":
            raise LocalError(f"wire is for all_reduce, not for {self.collective}")
        if self.algorithm == "ring":
            require_ring_options(self.precision, self.wire)
        how = self.element_format()
        if how is not None and how.gathered:
            require_gathering(self.algorithm, self.wire)

    def element_format(self) -> ElementFormat | None:
        """Return how the elements of a reduction travel; None where nothing is reduced. Raises LocalError."""
        if self.collective not in _REDUCTIONS:
            return None
        op = ReduceOp.parse(self.op)
        return element_format(DTYPES[self.dtype], op, leaves=self.total, precision=self.precision, wire=self.wire)

    def schedule(self) -> Schedule:
        """Return the schedule of the call. Raises LocalError."""
        self.check()
        how, world, elements, rows = (
            self.element_format(),
            self.world,
            self.elements,
            even_rows(self.elements, self.world),
        )
        common: dict[str, Any] = {
            "world": world,
            "sites": self.sites or (0,) * world,
            "chunk_bytes": self.chunk_bytes,
        }
        if how is not None:
            sizes: dict[str, Any] = {"elements": how.elements([elements])}
            if self.collective == "reduce":
                sizes = {"root": self.root, **sizes}
            elif self.collective == "reduce_scatter":
                sizes = {"counts": rows}
            return reduction(self.collective, how, sizes=sizes, leaves=self.total, **common)
        moved: dict[str, dict[str, Any]] = {
            "all_gather": {"counts": rows},
            "gather": {"root": self.root, "counts": rows},
            "scatter": {"root": self.root, "counts": rows},
            "all_to_all": {"counts": (rows,) * world},
            "broadcast": {"root": self.root, "elements": elements},
            "send": {"source": (self.root + 1) % world, "to": self.root, "elements": elements},
            "barrier": {},
        }
        return move(self.collective, DTYPES[self.dtype].itemsize, sizes=moved[self.collective], **common)

    @property
    def rivals(self) -> tuple[str, ...]:
        """The algorithms that the call could ask for."""
        how = self.element_format()
        known = plan.ALGORITHMS.get("all_gather" if how is not None and how.gathered else self.collective, ())
        orderless = self.precision == "exact" or self.wire is not None
        return tuple(name for name in known if not (orderless and name == "ring"))


def explain(
    collective: Annotated[str, typer.Argument(help=f"One of {', '.join((*_REDUCTIONS, *_MOVES))}.")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks.", min=1, max=256)] = 4,
    nbytes: Annotated[
        str,
        typer.Option("--bytes", help="Size of the tensor (all_gather, gather: of the result), as 64MiB, 10k or 1000."),
    ] = "64MiB",
    algorithm: Annotated[
        str, typer.Option(help="The algorithm; auto is the cheapest by the model, ring the ring order.")
    ] = "auto",
    sites: Annotated[
        str, typer.Option(help="Number of ranks on each site, as 3,3. By default all are on one.", show_default=False)
    ] = "",
    dtype: Annotated[str, typer.Option(help="Type of the elements.")] = "float32",
    leaves: Annotated[
        int | None,
        typer.Option(help="Logical shards of a reduction; by default one for each rank.", show_default=False),
    ] = None,
    op: Annotated[str, typer.Option(help="Operation of a reduction: sum, avg, max, ...")] = "sum",
    precision: Annotated[str, typer.Option(help="Precision of a reduction: default, float64 or exact.")] = "default",
    exact: Annotated[bool, typer.Option("--exact", help="Reduce exactly; the same as --precision exact.")] = False,
    wire: Annotated[
        str | None,
        typer.Option(
            help="Wire format of an all_reduce: bfloat16, int8, int4, topk:1/64, topk-2bit:1/16.", show_default=False
        ),
    ] = None,
    root: Annotated[int, typer.Option(help="The root; for send the receiver.")] = 0,
    chunk_bytes: Annotated[str, typer.Option(help="The longest message.")] = "1MiB",
    rtt_ms: Annotated[float, typer.Option(help="Round trip within a site, milliseconds.")] = 2e3 * NEAR[0],
    mbit: Annotated[float, typer.Option(help="Rate of a path within a site, Mbit/s.")] = 8e-6 * NEAR[1],
    far_rtt_ms: Annotated[float, typer.Option(help="Round trip between sites, milliseconds.")] = 2e3 * FAR[0],
    far_mbit: Annotated[float, typer.Option(help="Rate between two sites, Mbit/s, shared.")] = 8e-6 * FAR[1],
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw ranks, messages and time into this file: of many chunks a few, or all with --full.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead: costs, not steps.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Print every step of every rank, and draw every message.")
    ] = False,
) -> None:
    """Print the predicted cost of a collective, the cost of the alternatives, and the steps of each rank."""
    try:
        question = ExplainedCall(
            collective,
            world=ranks,
            nbytes=size_of(nbytes),
            algorithm=algorithm,
            sites=_sites(sites, ranks),
            dtype=dtype,
            leaves=leaves,
            op=op,
            precision=_precision(precision, exact=exact),
            wire=wire,
            root=root,
            chunk_bytes=size_of(chunk_bytes),
        )
        schedule = question.schedule()
        network = schedule.network(
            NetworkModel.between(
                schedule.sites,
                latency=rtt_ms / 2e3,
                rate=mbit * 1e6 / 8,
                far_latency=far_rtt_ms / 2e3,
                far_rate=far_mbit * 1e6 / 8,
            )
        )
        taken = algorithm if algorithm != "auto" else schedule.cheapest(network)
        plans = schedule.plans(algorithm, network)
        forecast = predict(plans, network)
    except LocalError as error:
        raise typer.BadParameter(str(error)) from error
    lowest = limit(schedule.collective, schedule.nbytes, network)
    if as_json:
        rivals = _forecasts(schedule, question.rivals, taken, forecast, network)
        others = {name: one for name, one in rivals if one is not None}
        facts = {"plan": plans[0].signature, "algorithm": taken, "nbytes": schedule.nbytes, "limit_s": lowest}
        costs = {name: _cost(one) for name, one in {taken: forecast, **others}.items()}
        typer.echo(json.dumps({**facts, "costs": costs}, indent=2))
    else:
        typer.echo(plans[0].signature)
        _print_costs(question, schedule, forecast, lowest, network)
        if question.rivals:
            typer.echo("")
            _print_table(schedule, question.rivals, taken, forecast, network)
            _print_remarks(question, schedule, network)
        _print_schedule(plans, full=full)
    if plot is not None:
        notes = [
            f"predicted {_ms(forecast.seconds)}, limit {_ms(lowest)}; {len(forecast.flights)} messages",
            plans[0].signature,
        ]
        picture = draw(forecast, network, title=_title(question, plans[0]), notes=notes, full=full)
        try:
            plot.write_text(picture, encoding="utf-8")
        except OSError as error:
            raise LocalError(f"cannot write {plot}: {error.strerror or error}") from error
        typer.echo(f"\ndrawn to {plot}", err=as_json)


def _cost(forecast: Forecast) -> dict[str, float]:
    return {
        "predicted_s": forecast.seconds,
        "messages": len(forecast.flights),
        "busiest_rank_bytes": forecast.busiest,
        "between_sites_bytes": forecast.crossing,
    }


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


def _precision(text: str, *, exact: bool) -> Precision:
    """As the calls have it. Raises LocalError."""
    known: dict[str, Precision] = {name: name for name in get_args(Precision)}
    if text not in known:
        raise LocalError(f"precision {text!r} is not known; use 'default', 'float64' or 'exact'")
    if exact and text == "float64":
        raise LocalError("exact has an accumulator of its own: leave precision float64 out")
    return "exact" if exact else known[text]


def _title(question: ExplainedCall, made: plan.Plan) -> str:
    """Of a picture: "all_reduce, hierarchical: 1.00 MiB on 6 ranks of 2 sites"."""
    ranks = f"{made.world} rank{'s' if made.world > 1 else ''}"
    several = len(set(question.sites))
    where = f"{ranks} of {several} sites" if several > 1 else ranks
    size = "" if made.collective == "barrier" else f"{_mib(question.nbytes)} of {question.dtype} on "
    as_ = "" if question.wire is None else f" as {question.wire}"
    return f"{made.collective}, {made.algorithm}: {size}{where}{as_}"


def _print_schedule(plans: list[plan.Plan], *, full: bool) -> None:
    for made in plans if full else plans[:_SCHEDULE_RANKS]:
        lines = made.describe().splitlines()[1:]
        shown = lines if full else lines[:_SCHEDULE_LINES]
        typer.echo("")
        for line in shown:
            typer.echo(line)
        if len(lines) > len(shown):
            typer.echo(f"  ... {len(lines) - len(shown)} more lines (--full)")
    if len(plans) > _SCHEDULE_RANKS and not full:
        typer.echo(f"\n... {len(plans) - _SCHEDULE_RANKS} more ranks (--full)")


def _print_costs(
    question: ExplainedCall, schedule: Schedule, forecast: Forecast, lowest: float, network: NetworkModel
) -> None:
    typer.echo("")
    _print_travel(question, schedule)
    typer.echo(f"predicted     {_ms(forecast.seconds)}   (messages of 100 us at each end; no loss, no other traffic)")
    if question.algorithm == "auto" and schedule.announced:
        typer.echo("              auto runs none of these: what ranks give travels in the announcements of their calls")
    if question.collective == "barrier":
        typer.echo("              that all ranks have called it they tell each other before any operation ends")
    typer.echo(f"limit         {_ms(lowest)}   {_formula(schedule.collective)}, B the fastest port, with its delays")
    _print_traffic(forecast, network)


def _print_travel(question: ExplainedCall, schedule: Schedule) -> None:
    """Print what travels for the tensor."""
    how = question.element_format()
    if question.collective == "barrier":
        return
    typer.echo(f"tensor        {_mib(question.nbytes)}, {question.elements} elements of {question.dtype}")
    if how is None:
        return
    if how.form is not None:
        held = -(-question.total // question.world)
        if how.gathered:
            coding = how.coding_seconds(question.elements, held + question.total)
            typer.echo(f"travels as    {how.form.codec.name}, {_mib(schedule.nbytes)} for all {question.total} leaves")
            typer.echo(f"coding        {_ms(coding)}   more, of a processor: leaves encoded, all of them decoded")
            typer.echo("partial sums  none: all leaves go to all ranks, and the result is not encoded")
            return
        coding = how.coding_seconds(question.elements, held)
        typer.echo(f"travels as    {how.form.codec.name}, {_mib(schedule.nbytes)}")
        typer.echo(f"coding        {_ms(coding)}   more, of a processor: leaves encoded, the result decoded")
    loose = f"; nodes of up to {schedule.loose} leaves travel as these" if schedule.loose > 1 else ""
    ratio = how.acc.itemsize / how.dtype.itemsize
    typer.echo(f"partial sums  {how.acc}, {how.acc.itemsize} bytes an element, {ratio:.3g} of a leaf{loose}")


def _print_traffic(forecast: Forecast, network: NetworkModel) -> None:
    typer.echo(f"messages      {len(forecast.flights)}")
    typer.echo(f"busiest rank  {_mib(forecast.busiest)} one way")
    if max(network.sites) > 0:
        typer.echo(f"between sites {_mib(forecast.crossing)}, both ways together")


def _forecasts(
    schedule: Schedule, known: tuple[str, ...], taken: str, forecast: Forecast, network: NetworkModel
) -> Iterator[tuple[str, Forecast | None]]:
    """Each algorithm that the call could ask for with its forecast; None where it is not for so large a tensor.

    That which is taken is priced as it is run: "auto" fits its messages to the network, which who names one does not.
    """
    for name in known:
        fits = name != "exchange" or schedule.nbytes <= 1 << 20
        yield name, forecast if name == taken else predict(schedule.plans(name), network) if fits else None


def _print_remarks(question: ExplainedCall, schedule: Schedule, network: NetworkModel) -> None:
    """Print what the table does not show: in which messages "auto" sends, and why it never takes the ring's order."""
    if question.algorithm != "auto":
        return
    fitted, _ = messages(network, schedule.chunk_bytes)
    if schedule.settled("auto") == "auto" and fitted != schedule.chunk_bytes:
        typer.echo(
            f"* in messages of {_mib(fitted)}, which auto fits to the network; the other rows are of "
            f"{_mib(schedule.chunk_bytes)}"
        )
    if "ring" in question.rivals and question.collective in _REDUCTIONS:
        typer.echo('auto never takes ring: its sums have other bits, so it is asked for, by reduce_order="ring"')


def _print_table(
    schedule: Schedule, known: tuple[str, ...], taken: str, forecast: Forecast, network: NetworkModel
) -> None:
    typer.echo(f"{'algorithm':<14}{'predicted':>12}{'messages':>10}{'busiest rank':>16}{'between sites':>16}")
    for name, one in _forecasts(schedule, known, taken, forecast, network):
        if one is None:
            typer.echo(f"{name:<14}{'-':>12}   not for tensors of more than 1 MiB")
            continue
        mark = " *" if name == taken else ""
        typer.echo(
            f"{name:<14}{_ms(one.seconds):>12}{len(one.flights):>10}{_mib(one.busiest):>16}{_mib(one.crossing):>16}{mark}"
        )


def _formula(collective: str) -> str:
    return {
        "all_reduce": "2 (N - 1) / N * S / B + 2 delays",
        "reduce": "S / B + 1 delay",
        "broadcast": "S / B + 1 delay",
        "send": "S / B + 1 delay",
        "barrier": "1 delay",
    }.get(collective, "(N - 1) / N * S / B + 1 delay")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _mib(nbytes: int) -> str:
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.2f} MiB"
    return f"{nbytes >> 10} KiB" if nbytes and nbytes % 1024 == 0 else f"{nbytes} B"
