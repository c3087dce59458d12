"""What a group runs and what `quicoll explain` says of it are one thing, for every call that can be made."""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quicoll.cli.app import app
from quicoll.cli.explain import ExplainedCall
from quicoll.collectives.group import Group
from quicoll.collectives.shards import Shards
from quicoll.engine.calls import Known
from quicoll.errors import LocalError
from quicoll.membership.view import Member, View
from quicoll.numerics.canonical_order import leaves_of
from quicoll.numerics.dtypes import DTYPES
from quicoll.numerics.exact import MAX_LEAVES
from quicoll.numerics.reduce import ReduceOp
from quicoll.plan import MOVES, Plan, SendStep, validate
from quicoll.plan.network import NetworkModel
from quicoll.plan.schedule import element_format

if TYPE_CHECKING:
    from quicoll.collectives.operation import Operation
    from quicoll.engine.calls import Call


class Desk:
    """Where a group's calls end up: nothing runs, the last call is kept."""

    def __init__(self, rank: int, sites: tuple[int, ...], chunk_bytes: int) -> None:
        self.rank, self.world_size = rank, len(sites)
        self.config = SimpleNamespace(chunk_bytes=chunk_bytes)
        members = tuple(
            Member(rank=number, node=f"n{number}", incarnation=1, site=f"s{site}") for number, site in enumerate(sites)
        )
        self.view = View(view_id=1, members=members, seed=bytes(32), committed_step=0, committed_view=0)
        self.recycler = None
        self.called: Call | None = None

    def issue(self, operation: Operation[Any], timeout: float | None) -> Any:
        self.called = operation.call()
        return SimpleNamespace(future=Future())

    def claim(self, derived: int, name: str) -> None:
        pass

    def near(self, view_id: int) -> None:
        return None


def plan_of(rank: int, question: ExplainedCall, sites: tuple[int, ...], network: NetworkModel) -> Plan:
    """What a group of this rank would execute for the call in `question`, on this network."""
    desk = Desk(rank, sites, question.chunk_bytes)
    group = Group(desk)
    dtype = DTYPES[question.dtype]
    full = np.zeros(question.elements, dtype.storage)
    options: dict[str, Any] = {}
    x: Any = typed(full, question.dtype)
    counts: list[tuple[int, ...] | None] = [None] * len(sites)
    if question.collective in ("all_reduce", "reduce", "reduce_scatter"):
        mine = leaves_of(rank, len(sites), question.total)
        x = Shards(question.total, mine.start, len(mine), 1).leaves([x] * len(mine), like=x)
        options = {"op": question.op, "precision": question.precision, "algorithm": question.algorithm}
        if question.algorithm == "ring":
            options = {"op": question.op, "precision": question.precision, "reduce_order": "ring"}
        if question.collective == "all_reduce":
            options["wire"] = question.wire
    elif question.algorithm != "auto":
        options["algorithm"] = question.algorithm
    each = -(-question.elements // len(sites))
    rows = tuple(max(0, min(each, question.elements - each * r)) for r in range(len(sites)))
    if question.collective in ("all_gather", "gather"):
        x = typed(full[: rows[rank]], question.dtype)
        counts = [(row,) for row in rows]
    elif question.collective == "scatter" or question.collective == "all_to_all":
        counts = [rows] * len(sites)
    if question.collective in ("reduce", "gather", "scatter", "broadcast"):
        options["root"] = question.root
    call = getattr(group, question.collective)
    call(**options) if question.collective == "barrier" else call(x, **options)
    assert desk.called is not None
    work = desk.called.make(Known(counts, network if desk.called.measures else None))
    assert work.output.size == work.plan.output
    assert [leaf.size for leaf in work.inputs] == list(work.plan.inputs)
    assert (work.dtype.itemsize, work.acc.itemsize) == (work.plan.itemsize, work.plan.wide_itemsize)
    return work.plan


def typed(values: Any, name: str) -> Any:
    """bfloat16 and float8 are types of torch alone."""
    if name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return values
    import torch

    return torch.zeros(values.size, dtype=getattr(torch, name))


QUESTIONS = [
    *(
        ExplainedCall("all_reduce", world=world, nbytes=nbytes, leaves=leaves, **options)
        for world, nbytes, leaves in ((1, 400, 3), (3, 50_001, None), (4, 40_000, 13), (5, 100_000, 2), (2, 70_000, 48))
        for options in (
            {},
            {"precision": "exact"},
            {"precision": "exact", "op": "avg", "dtype": "float64"},
            {"wire": "bfloat16"},
            {"wire": "int8"},
            {"wire": "int8", "precision": "exact", "dtype": "complex64"},
            {"wire": "int4"},
            {"wire": "topk:1/8"},
            {"wire": "topk:1/64", "precision": "exact", "dtype": "float64", "op": "avg"},
            {"wire": "bfloat16", "dtype": "float64", "precision": "float64"},
            {"dtype": "bfloat16"},
            {"dtype": "float8_e5m2", "op": "max"},
            {"dtype": "int16", "op": "avg", "precision": "exact"},
            {"dtype": "complex128"},
        )
    ),
    *(
        ExplainedCall("all_reduce", world=6, nbytes=90_000, algorithm=algorithm, **options)
        for algorithm in ("direct", "tree", "hierarchical", "exchange", "ring")
        for options in ({}, {"dtype": "float16"}, {"precision": "exact"}, {"wire": "int8"})
        if algorithm != "ring" or options in ({}, {"dtype": "float16"})
    ),
    *(
        ExplainedCall(collective, world=6, nbytes=90_000, algorithm=algorithm, precision=precision, leaves=leaves)
        for collective in ("reduce", "reduce_scatter")
        for algorithm in ("auto", "direct", "tree", "hierarchical")
        for precision in ("default", "exact")
        for leaves in (6, 15)
    ),
    ExplainedCall("reduce", world=4, nbytes=10_000, root=3),
    *(
        ExplainedCall(
            collective, world=5, nbytes=90_001, root=2 * (collective != "all_gather"), dtype=dtype, algorithm=name
        )
        for collective, known in MOVES.items()
        for name in ("auto", *known)
        for dtype in ("int8", "float64")
    ),
    ExplainedCall("all_to_all", world=5, nbytes=90_001),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{q.collective}-{q.algorithm}-{q.world}")
def test_what_is_explained_is_what_a_group_runs(question: ExplainedCall) -> None:
    sites = tuple(int(rank >= question.world // 2) for rank in range(question.world)) if question.world > 1 else (0,)
    network = NetworkModel.between(sites, latency=1e-4, rate=1e8, far_latency=0.02, far_rate=1e7)
    asked = replace(question, sites=sites, chunk_bytes=4096)
    schedule = asked.schedule()
    explained = schedule.plans(asked.algorithm, network)
    assert explained == [plan_of(rank, asked, sites, network) for rank in range(question.world)]
    validate(explained)


@pytest.mark.parametrize(
    ("options", "bytes_an_element", "partial"),
    [
        ((), 4, "float32, 4 bytes an element, 1 of a leaf"),
        (("--exact",), 4, "exact_float32, 44 bytes an element, 11 of a leaf; nodes of up to 11 leaves"),
        (("--wire", "bfloat16"), 2, "float32, 4 bytes an element, 2 of a leaf; nodes of up to 2 leaves"),
        (("--wire", "int8"), 260 / 256, "blocks_of_float32, 1024 bytes an element, 3.94 of a leaf; nodes of up to 3"),
        (("--wire", "int4"), 34 / 64, "blocks_of_float32, 256 bytes an element, 7.53 of a leaf; nodes of up to 7"),
        (("--dtype", "float64", "--exact"), 8, "exact_float64, 272 bytes an element, 34 of a leaf"),
        (("--dtype", "bfloat16",), 2, "float32, 4 bytes an element, 2 of a leaf"),
    ],
)  # fmt: skip
def test_the_command_prints_the_bytes_and_messages_of_those_plans(
    options: tuple[str, ...], bytes_an_element: float, partial: str
) -> None:
    """4 ranks with a leaf each, direct: 2 (p - 1) / p of what travels, out and in, for any accumulator."""
    elements = 1 << 20
    size = {"float64": 8, "bfloat16": 2}.get(next((text for text in options if "float" in text), ""), 4)
    size = 4 if "--wire" in options else size
    text = printed("all_reduce", "--bytes", str(elements * size), "--algorithm", "direct", *options)
    assert f"partial sums  {partial}" in text
    assert f"{elements} elements of" in text
    assert re.search(r"busiest rank  (.*) one way", text)[1] == mib(2 * 3 / 4 * elements * bytes_an_element)
    question = ExplainedCall(
        "all_reduce",
        world=4,
        nbytes=elements * size,
        algorithm="direct",
        dtype=options[options.index("--dtype") + 1] if "--dtype" in options else "float32",
        precision="exact" if "--exact" in options else "default",
        wire=options[options.index("--wire") + 1] if "--wire" in options else None,
    )
    plans = [plan_of(rank, question, (0,) * 4, NetworkModel.between((0,) * 4, latency=1, rate=1)) for rank in range(4)]
    sends = sum(isinstance(step, SendStep) for each in plans for lane in each.lanes for step in lane.steps)
    assert f"messages      {sends}\n" in text


def test_what_is_gathered_is_explained_as_a_gathering() -> None:
    elements = 1 << 22
    text = printed("all_reduce", "--bytes", str(4 * elements), "--wire", "topk:1/64")
    assert "partial sums  none: all leaves go to all ranks" in text
    assert re.search(r"busiest rank  (.*) one way", text)[1] == mib(3 * elements * 224 / 4096)
    assert rows_of(text) == ["direct", "hierarchical"]


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def rows_of(text: str) -> list[str]:
    """The algorithms of the table, which an empty line ends."""
    table = text[text.index("algorithm   ") :].split("\n\n")[0].splitlines()[1:]
    return [line.split()[0] for line in table if "predicted" not in line and "never takes" not in line]


def mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.2f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:g} KiB"


def test_exact_and_encoded_reductions_cost_more_to_combine_and_encoding_is_told() -> None:
    def predicted(*options: str) -> float:
        text = printed("all_reduce", "--bytes", "4MiB", "--mbit", "100000", "--algorithm", "direct", *options)
        return float(re.search(r"predicted +([0-9.]+) ms", text)[1])

    assert predicted("--exact") > 2 * predicted()
    assert predicted("--wire", "int8") > predicted("--wire", "bfloat16")
    assert "coding        8.39 ms" in printed("all_reduce", "--bytes", "4MiB", "--wire", "bfloat16")
    assert "coding" not in printed("all_reduce", "--bytes", "4MiB", "--exact")


def test_a_ring_is_no_rival_of_what_has_no_order() -> None:
    def rows(*options: str) -> list[str]:
        return rows_of(printed("all_reduce", "--bytes", "100k", *options))

    assert rows() == ["direct", "tree", "hierarchical", "exchange", "ring"]
    assert rows("--exact") == rows("--wire", "int8") == ["direct", "tree", "hierarchical", "exchange"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["all_reduce", "--exact", "--precision", "float64"], "leave precision float64 out"),
        (["all_reduce", "--precision", "high"], "precision 'high' is not known"),
        (["all_reduce", "--exact", "--algorithm", "ring"], "an exact sum has no order"),
        (["all_reduce", "--wire", "int8", "--algorithm", "ring"], "are not encoded"),
        (["all_reduce", "--wire", "int2"], "wire format 'int2' is not known"),
        (["all_reduce", "--wire", "topk:1/64", "--op", "max"], "of which max means nothing"),
        (["all_reduce", "--wire", "topk:1/64", "--algorithm", "tree"], "gives all leaves to all ranks"),
        (["all_reduce", "--wire", "int8", "--dtype", "float64"], "float64 cannot travel as int8"),
        (["all_reduce", "--exact", "--op", "product"], "no exact form"),
        (["all_reduce", "--dtype", "float12"], "dtype 'float12' is not known"),
        (["reduce", "--wire", "int8"], "wire is for all_reduce"),
        (["broadcast", "--exact"], "broadcast computes nothing"),
        (["all_reduce", "--exact", "--leaves", str(MAX_LEAVES + 1)], f"at most {MAX_LEAVES} leaves"),
    ],
)
def test_what_no_call_could_ask_for_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["explain", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_what_travels_is_counted_for_each_tensor_of_a_list() -> None:
    how = element_format(DTYPES["complex64"], ReduceOp.SUM, leaves=1, wire="int8")
    assert how.elements([1, 128, 129]) == 1 + 1 + 2
    assert element_format(DTYPES["int8"], ReduceOp.SUM, leaves=1).elements([3, 4]) == 7
    with pytest.raises(LocalError, match="leaves"):
        element_format(DTYPES["float32"], ReduceOp.SUM, leaves=MAX_LEAVES + 1, precision="exact")
