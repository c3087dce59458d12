"""How often whole collectives copy payload on its way from one caller's memory to another's.

What is counted, over real sockets, for every operation:

- every message's memory, as `Link.send` and `Link.post` are given it: is it the callers' inputs, what the callers get,
  or neither (memory of ours)? Bytes of "other" are bytes that were, or will be, copied or computed from.
- every copy that numpy or torch is asked for while it runs (`numpy.copyto`, `Tensor.copy_`): a rank's own part, which
  has to come into its result by a copy, and results that are written to `out`.
- the most memory that numpy holds at a time (tracemalloc, numpy's domain), results of torch among it: a copy on no
  message's way is seen there.

What is not: QUIC's own copies between a message's memory and the socket (docs/internals/transport.md has them); what a
reduction reads and writes to compute; and memory that torch allocates.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from depth import some

from quicoll.numerics.buffers import source
from quicoll.numerics.destinations import IN_PLACE_BYTES
from quicoll.testing import cluster
from quicoll_transport.endpoint.link import Link

if TYPE_CHECKING:
    from quicoll import Job

WORLD = 3
CHUNK = 1 << 16
ROWS = 60_000  # of a rank: 240,000 bytes of float32, chunks of which the last is not full
SMALL = 1 << 15  # bytes of arrays that are no payload: nonces and numbers of runs of packets, above all
LISTED = (ROWS // 2, ROWS // 6, ROWS // 3)


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to a rank that is far away is copied, and a busy machine can make the shortest round trip as long."""
    monkeypatch.setattr(Link, "min_rtt_ns", property(lambda link: 1))


def spans(value: Any) -> list[tuple[int, int]]:
    """Where the memory of arrays and tensors, also in lists, begins and ends."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [span for each in value for span in spans(each)]
    if isinstance(value, torch.Tensor):
        return [(value.data_ptr(), value.data_ptr() + value.numel() * value.element_size())]
    start = value.__array_interface__["data"][0]
    return [(start, start + value.nbytes)]


@dataclass
class Counted:
    """messages: ("sent" or "posted", where its memory begins and ends). copied: bytes, for each copy. held: by numpy at
    the most."""

    messages: list[tuple[str, int, int]] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    held: int = 0

    def bytes_by_place(self, inputs: Any, results: Any) -> dict[str, int]:
        """Of messages: bytes by what was done and whose memory it was."""
        places = {"input": spans(inputs), "result": spans(results)}
        found: Counter[str] = Counter()
        for done, start, stop in self.messages:
            where = (name for name, given in places.items() if any(a <= start and stop <= b for a, b in given))
            found[f"{done} {next(where, 'other')}"] += stop - start
        return dict(found)


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    counted = Counted()
    with monkeypatch.context() as patch:

        def look(done: str, view: memoryview) -> None:
            if view.nbytes:
                start = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
                counted.messages.append((done, start, start + view.nbytes))
            numpys = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
            traces = tracemalloc.take_snapshot().filter_traces([numpys]).traces
            counted.held = max(counted.held, sum(trace.size for trace in traces))

        send, post, copyto, copy_ = Link.send, Link.post, np.copyto, torch.Tensor.copy_

        def sends(link: Link, tag: bytes, payload: memoryview, *more: Any) -> Any:
            look("sent", payload)
            return send(link, tag, payload, *more)

        def posts(link: Link, tag: bytes, buffer: memoryview, *more: Any) -> Any:
            look("posted", buffer)
            return post(link, tag, buffer, *more)

        def copies(target: Any, *args: Any, **kwargs: Any) -> None:
            counted.copied.append(target.nbytes)
            copyto(target, *args, **kwargs)

        def writes(target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            counted.copied.append(target.numel() * target.element_size())
            return copy_(target, *args, **kwargs)

        patch.setattr(Link, "send", sends)
        patch.setattr(Link, "post", posts)
        patch.setattr(np, "copyto", copies)
        patch.setattr(torch.Tensor, "copy_", writes)
        tracemalloc.start()
        try:
            yield counted
        finally:
            tracemalloc.stop()


def tensor(kind: str, rank: int, rows: int = ROWS) -> Any:
    """float32, or of torch a type that numpy has not."""
    made = np.random.default_rng(rank).standard_normal(rows).astype(np.float32)
    return made if kind == "numpy" else torch.from_numpy(made) if kind == "torch" else torch.from_numpy(made).bfloat16()


async def whole(
    monkeypatch: pytest.MonkeyPatch, jobs: Sequence[Job], call: Callable[[Job], Awaitable[Any]]
) -> tuple[Counted, list[Any]]:
    """What all ranks' part in one operation counts, and what they got."""
    await asyncio.gather(*(job.group.barrier() for job in jobs))  # nothing of an operation before is on its way
    with counting(monkeypatch) as counted:
        results = await asyncio.gather(*(call(job) for job in jobs))
    return counted, list(results)


async def nothing() -> None:
    """What a rank does that has no part."""


def pair(job: Job, x: Any) -> Awaitable[Any]:
    if job.rank == 2:
        return nothing()
    return job.group.send(x, to=1) if job.rank == 0 else job.group.recv(x, source=0)


P = WORLD
# What messages carry, and what is copied, in tensors of one rank.
MOVES: list[tuple[str, Callable[[Job, Any], Awaitable[Any]], dict[str, float], float]] = [
    (
        "all_gather", lambda job, x: job.group.all_gather(x),
        {"sent input": P * (P - 1), "posted result": P * (P - 1)}, P,
    ),
    ("gather", lambda job, x: job.group.gather(x, root=1), {"sent input": P - 1, "posted result": P - 1}, 1),
    (
        "scatter", lambda job, x: job.group.scatter(x, root=1),
        {"sent input": (P - 1) / P, "posted result": (P - 1) / P}, 1 / P,
    ),
    ("broadcast", lambda job, x: job.group.broadcast(x, root=1), {"sent input": P - 1, "posted result": P - 1}, 1),
    ("all_to_all", lambda job, x: job.group.all_to_all(x), {"sent input": P - 1, "posted result": P - 1}, 1),
    ("send", pair, {"sent input": 1, "posted result": 1}, 0),
]  # fmt: skip


@pytest.mark.parametrize("kind", some(["numpy", "torch", "bfloat16"], 2))
async def test_moves_go_from_the_callers_memory_into_the_result_itself(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Copied is a rank's own part alone. numpy holds the results, of either kind."""
    async with cluster(WORLD, chunk_bytes=CHUNK) as jobs:
        for name, call, messages, copied in MOVES:
            inputs = [tensor(kind, rank) for rank in range(WORLD)]
            counted, results = await whole(monkeypatch, jobs, lambda job, call=call, x=inputs: call(job, x[job.rank]))
            size = inputs[0].nbytes
            given = {where: found / size for where, found in counted.bytes_by_place(inputs, results).items()}
            assert (name, given, sum(counted.copied) / size) == (name, pytest.approx(messages), pytest.approx(copied))
            got = sum(stop - start for start, stop in spans(results))
            assert counted.held <= got + SMALL, name


# Leaves come into memory of ours, for there is none of the callers' that could hold them all; and results of a part
# whose owner does not keep it start there.
REDUCTIONS: list[tuple[str, Callable[[Job, Any], Awaitable[Any]], dict[str, float]]] = [
    (
        "all_reduce direct", lambda job, x: job.group.all_reduce(x, algorithm="direct"),
        {"sent input": P - 1, "posted other": P - 1, "sent result": P - 1, "posted result": P - 1},
    ),
    (
        "all_reduce hierarchical", lambda job, x: job.group.all_reduce(x, algorithm="hierarchical"),
        {"sent input": P - 1, "posted other": P - 1, "sent result": P - 1, "posted result": P - 1},
    ),
    (
        "all_reduce exchange", lambda job, x: job.group.all_reduce(x, algorithm="exchange"),
        {"sent input": P * (P - 1), "posted other": P * (P - 1)},
    ),
    (
        "all_reduce ring", lambda job, x: job.group.all_reduce(x, reduce_order="ring"),
        {"sent input": 1, "sent other": P - 2, "posted other": P - 1, "sent result": P - 1, "posted result": P - 1},
    ),
    (
        "reduce direct", lambda job, x: job.group.reduce(x, root=1, algorithm="direct"),
        {"sent input": P - 1, "posted other": P - 1, "sent other": (P - 1) / P, "posted result": (P - 1) / P},
    ),
    (
        "reduce_scatter direct", lambda job, x: job.group.reduce_scatter(x, algorithm="direct"),
        {"sent input": P - 1, "posted other": P - 1},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "one_in"), [("numpy", 1), ("torch", 4)])
async def test_reductions_send_leaves_from_the_callers_memory_and_results_from_where_they_stay(
    monkeypatch: pytest.MonkeyPatch, kind: str, one_in: int
) -> None:
    """Nothing is copied. Beside results, numpy holds what leaves are posted into, and partial sums."""
    async with cluster(WORLD, chunk_bytes=CHUNK) as jobs:
        for name, call, messages in some(REDUCTIONS, one_in):
            inputs = [tensor(kind, rank) for rank in range(WORLD)]
            counted, results = await whole(monkeypatch, jobs, lambda job, call=call, x=inputs: call(job, x[job.rank]))
            size = inputs[0].nbytes
            found = counted.bytes_by_place(inputs, results)
            given = {where: count / size for where, count in found.items()}
            # The owners' thirds of `reduce` are cut between elements.
            assert (name, given) == (name, pytest.approx(messages, abs=1e-3))
            assert (name, counted.copied) == (name, [])
            got = sum(stop - start for start, stop in spans(results))
            assert counted.held <= got + found["posted other"] + found.get("sent other", 0) + SMALL, name


async def test_a_tree_sends_leaves_from_the_callers_memory_and_only_partial_sums_from_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(WORLD, chunk_bytes=CHUNK) as jobs:
        inputs = [tensor("numpy", rank) for rank in range(WORLD)]
        counted, results = await whole(
            monkeypatch, jobs, lambda job: job.group.all_reduce(inputs[job.rank], algorithm="tree")
        )
    found, size = counted.bytes_by_place(inputs, results), inputs[0].nbytes
    assert found["posted other"] == found["posted result"] == found["sent result"] == (P - 1) * size
    assert found["sent input"] + found["sent other"] == (P - 1) * size
    assert found["sent input"] > found["sent other"]
    assert counted.copied == []


@pytest.mark.parametrize("kind", some(["numpy", "torch", "bfloat16"], 2))
async def test_out_is_written_once_by_one_copy(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An operation that is aborted must leave it alone, so the result is put together elsewhere."""
    inputs, outs = ([tensor(kind, rank) for rank in range(WORLD)] for _ in range(2))
    size = inputs[0].nbytes
    async with cluster(WORLD, chunk_bytes=CHUNK) as jobs:
        counted, results = await whole(
            monkeypatch, jobs, lambda job: job.group.broadcast(inputs[job.rank], out=outs[job.rank])
        )
    assert all(got is out for got, out in zip(results, outs, strict=True))
    assert counted.bytes_by_place(inputs, results) == {"sent input": (P - 1) * size, "posted other": (P - 1) * size}
    assert sum(counted.copied) == size + P * size
    assert counted.held <= P * size + SMALL


@pytest.mark.parametrize("kind", ["numpy", "torch", "bfloat16"])
async def test_a_reduction_comes_straight_into_a_large_out(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Nothing is copied, and the only memory of ours is what the leaves of the chunks under way come into."""
    rows = IN_PLACE_BYTES // (2 if kind == "bfloat16" else 4)
    inputs, outs = ([tensor(kind, rank, rows) for rank in range(WORLD)] for _ in range(2))
    async with cluster(WORLD, chunk_bytes=4 * CHUNK) as jobs:
        counted, results = await whole(
            monkeypatch,
            jobs,
            lambda job: job.group.all_reduce(inputs[job.rank], out=outs[job.rank], algorithm="direct"),
        )
    assert all(got is out for got, out in zip(results, outs, strict=True))
    found = counted.bytes_by_place(inputs, results)
    assert found["posted result"] == found["sent result"] == found["sent input"] == (P - 1) * inputs[0].nbytes
    if kind != "bfloat16":  # which is widened and rounded: that is computing
        assert counted.copied == []
    assert [source(out).flat.tobytes() for out in outs] == [source(outs[0]).flat.tobytes()] * P


@pytest.mark.parametrize("kind", ["numpy", "torch"])
async def test_a_list_of_tensors_copies_only_chunks_that_span_two(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    inputs = [[tensor(kind, rank, rows) for rows in LISTED] for rank in range(WORLD)]
    size = sum(each.nbytes for each in inputs[0])
    async with cluster(WORLD, chunk_bytes=CHUNK) as jobs:
        counted, results = await whole(monkeypatch, jobs, lambda job: job.group.broadcast(inputs[job.rank]))
    found = counted.bytes_by_place(inputs, [memory_of(row) for row in results])
    assert found["posted result"] == (P - 1) * size
    assert 0 < found["sent other"] <= (P - 1) * (len(LISTED) - 1) * CHUNK
    assert found["sent input"] == (P - 1) * size - found["sent other"]
    assert set(found) == {"posted result", "sent input", "sent other"}


def memory_of(row: Sequence[Any]) -> Any:
    """The one piece of memory that tensors of a list share."""
    first = row[0]
    return first._base if isinstance(first, torch.Tensor) else first.base


@pytest.mark.parametrize("kind", ["numpy", "torch"])
async def test_what_is_not_contiguous_is_copied_once_by_its_rank(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The other tests would see such a copy if there were one."""
    wide = [tensor(kind, rank, 2 * ROWS) for rank in range(WORLD)]
    async with cluster(WORLD, chunk_bytes=CHUNK) as jobs:
        counted, results = await whole(monkeypatch, jobs, lambda job: job.group.all_gather(wide[job.rank][::2]))
    size = 4 * ROWS
    assert counted.bytes_by_place(wide, results) == {
        "sent other": P * (P - 1) * size, "posted result": P * (P - 1) * size,
    }  # fmt: skip
