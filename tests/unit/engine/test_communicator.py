"""A view's communicator: what it sends, how operations end, and what their callers get."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fake_links import FakeLink, FakeTransfer, nothing_copied

from quicoll.engine.calls import Call, Known, Work
from quicoll.engine.communicator import Communicator, view_prefix
from quicoll.engine.given import seal_given
from quicoll.engine.messages import Announce, Farewell, decode_message
from quicoll.errors import Corrupted, LocalError, Mismatch, Partitioned, PeerError, QuicollError
from quicoll.membership.view import Member, View
from quicoll.numerics.dtypes import DType
from quicoll.numerics.reduce import ReduceOp
from quicoll.plan import Buf, Lane, Plan, RecvStep, SendStep, Span
from quicoll.plan.choice import RULES
from quicoll_transport.errors import LinkLost, MessageCorrupted, MessageRefused
from quicoll_transport.sim import World

__all__ = ["nothing_copied"]

pytestmark = pytest.mark.usefixtures("nothing_copied")

S = 1_000_000_000
VIEW_ID = 7
FLOAT64 = DType.parse("float64")
IN, OUT = Span(Buf.INPUT, 0, 0, 1), Span(Buf.OUTPUT, 0, 0, 1)


def made(known: Known) -> Work:
    """Send a number to rank 1, receive one from it."""
    plan = Plan(
        collective="test",
        algorithm="direct",
        rank=0,
        world=3,
        lanes=(Lane((SendStep(1, 0, IN), RecvStep(1, 1, OUT))),),
        inputs=(1,),
        output=1,
        leaves=0,
        itemsize=8,
        wide_itemsize=8,
        width=1,
        parameters=(),
    )
    return Work(plan, FLOAT64, FLOAT64, ReduceOp.SUM, [np.ones(1)], np.zeros(1))


class Bench:
    """Rank 0 of three on a simulated clock. `failed`: what it reported as failed, and the ranks that caused it."""

    def __init__(self, world: World, late: Any = None, late_ns: int = -1) -> None:
        self.world = world
        self.loop = world.host("a").start()
        self.log: list[FakeTransfer] = []
        self.links = {rank: FakeLink(rank, self.log) for rank in (1, 2)}
        self.failed: list[tuple[QuicollError, tuple[int, ...]]] = []
        self.called: list[str] = []
        members = tuple(Member(rank=rank, node="abc"[rank], incarnation=1) for rank in range(3))
        links: Any = self.links
        self.communicator = Communicator(
            View(view_id=VIEW_ID, members=members, seed=0, committed_step=0, committed_view=0),
            node="a",
            loop=self.loop,
            links=links,
            on_failure=lambda error, ranks: self.failed.append((error, ranks)),
            on_called=lambda op, arrived_ns, near: self.called.append(op),
            late_ns=late_ns,
            late=late,
        )

    def turn(self, seconds: float = 0.0) -> None:
        self.world.run(limit_ns=round(seconds * S))

    def run(self, call: Call | None = None, *, timeout: float = 2.0) -> asyncio.Task[int]:
        call = Call("barrier", "barrier", made) if call is None else call
        task = self.loop.create_task(self._run(call, timeout))
        self.turn()
        return task

    async def _run(self, call: Call, timeout: float) -> int:
        answer: asyncio.Future[int] = self.loop.create_future()

        def ended(number: int | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if number is None:
                answer.set_exception(error or AssertionError("neither number nor error"))
            else:
                answer.set_result(number)

        operation = self.communicator.start(call, group=0, timeout=timeout, step=None, ended=ended)
        try:
            return await answer
        except asyncio.CancelledError:
            assert operation is not None
            operation.cancel()
            raise

    def hear(self, rank: int, seq: int = 0, signature: str = "barrier", given: bytes = b"") -> None:
        self.communicator.announced(rank, Announce(VIEW_ID, 0, seq, signature, given=given))
        self.turn()

    def all_call(self, seq: int = 0) -> None:
        self.hear(1, seq)
        self.hear(2, seq)

    def of(self, kind: str) -> FakeTransfer:
        return next(transfer for transfer in reversed(self.log) if transfer.kind == kind)

    def messages(self, rank: int) -> list[Any]:
        return [decode_message(data, node="a") for data in self.links[rank].messages]

    def end(self, error: QuicollError) -> None:
        self.communicator.end(error)
        self.turn()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with World(1) as world:
        yield Bench(world)


def error_of(task: asyncio.Task[int]) -> BaseException:
    assert task.done()
    error = task.exception()
    assert error is not None
    return error


def is_over(bench: Bench) -> bool:
    return all(transfer.done for transfer in bench.log)


# -- operations that go well -----------------------------------------------------------------------------------------


def test_an_operation_announces_executes_meanwhile_and_ends_when_all_have_called(bench: Bench) -> None:
    task = bench.run()
    assert bench.messages(1) == bench.messages(2) == [Announce(VIEW_ID, 0, 0, "barrier")]
    assert [repr(transfer) for transfer in bench.log] == ["post 1 rank 1", "send 0 rank 1"]
    assert bench.log[0].tag.startswith(view_prefix(VIEW_ID))
    bench.of("send").go()
    bench.of("post").arrive(np.ones(1).tobytes())
    bench.hear(1)
    assert not task.done()
    bench.hear(2)
    assert task.result() == 0
    assert bench.called == ["barrier#0"]
    assert (bench.communicator.running, bench.communicator.error, bench.failed) == (0, None, [])


def test_memory_is_let_go_of_at_the_end_and_not_by_a_later_garbage_collection(bench: Bench) -> None:
    """Chunks of a few MiB that stay until then make a stream of them take as much memory as all of it."""
    outputs: list[weakref.ref[Any]] = []

    def make(known: Known) -> Work:
        work = made(known)
        outputs.append(weakref.ref(work.output))
        return work

    gc.disable()
    try:
        task = bench.run(Call("barrier", "barrier", make))
        bench.all_call()
        bench.of("post").arrive(np.ones(1).tobytes())
        bench.of("send").go()
        bench.turn()
        assert task.result() == 0
        del task
        bench.log.clear()
        assert outputs[0]() is None
    finally:
        gc.enable()


def test_all_have_called_and_the_data_is_still_on_its_way(bench: Bench) -> None:
    task = bench.run()
    bench.all_call()
    assert (task.done(), bench.communicator.running) == (False, 1)
    bench.of("send").go()
    bench.of("post").arrive(np.ones(1).tobytes())
    bench.turn()
    assert task.result() == 0


def test_numbers_follow_the_order_of_the_calls_and_not_of_the_ends(bench: Bench) -> None:
    tasks = [bench.run(), bench.run()]
    bench.all_call(1)
    for transfer in bench.log[2:]:
        transfer.go()
    bench.turn()
    assert [task.done() for task in tasks] == [False, True]
    assert tasks[1].result() == 1


def test_a_call_that_gathers_makes_its_work_of_what_all_have_announced(bench: Bench) -> None:
    seen: list[Known] = []

    def make(known: Known) -> Work:
        seen.append(known)
        return made(known)

    bench.run(Call("all_gather", "all_gather", make, counts=(4,), gathers=True))
    assert (seen, bench.log) == ([], [])
    for rank in (2, 1):
        bench.communicator.announced(rank, Announce(VIEW_ID, 0, 0, "all_gather", (rank,)))
    bench.turn()
    assert [known.counts for known in seen] == [[(4,), (1,), (2,)]]
    assert len(bench.log) == 2


def announced(seen: list[list[bytes]], given: bytes = b"mine", sizes: tuple[int, ...] = (4, 4, 4)) -> Call:
    """A call of which all see what each gives; `seen` gets what this rank saw."""

    def taken(payloads: Sequence[bytes], counts: object) -> None:
        seen.append(list(payloads))

    def never(*_: object) -> Any:
        raise AssertionError("it fits")

    return Call("all_reduce", "sum", never, sizes=sizes, combine=taken, given=seal_given(given))


def test_what_ranks_give_in_their_announcements_is_used_when_all_have_called(bench: Bench) -> None:
    seen: list[list[bytes]] = []
    task = bench.run(announced(seen))
    assert bench.messages(1) == [Announce(VIEW_ID, 0, 0, "sum", given=seal_given(b"mine"))]
    bench.hear(2, signature="sum", given=seal_given(b"last"))
    assert not task.done()
    assert seen == []
    bench.hear(1, signature="sum", given=seal_given(b"next"))
    assert task.result() == 0
    assert seen == [[b"mine", b"next", b"last"]]
    assert (bench.log, bench.called, bench.communicator.running) == ([], ["all_reduce#0"], 0)


@pytest.mark.parametrize(("apart", "told"), [(0.1, []), (0.100001, ["all_reduce#0", "barrier#1"])])
def test_that_all_have_called_is_told_where_they_called_apart(apart: float, told: list[str]) -> None:
    with World(1) as world:
        bench = Bench(world, late_ns=S // 10)
        tasks = [bench.run(announced([])), bench.run()]
        for rank, pause in ((1, 0.0), (2, apart)):
            bench.turn(pause)
            for seq, signature, given in ((0, "sum", seal_given(b"four")), (1, "barrier", b"")):
                bench.communicator.announced(rank, Announce(VIEW_ID, 0, seq, signature, given=given))
            bench.turn()
        assert tasks[0].result() == 0
        assert bench.called == told


def test_a_call_whose_time_is_up_before_it_begins_fails_though_no_other_has_called(bench: Bench) -> None:
    task = bench.run(announced([]), timeout=0.0)
    bench.turn()
    bench.end(bench.failed[0][0])
    assert "did not call all_reduce#0 within 0 s" in str(task.exception())


def test_calls_are_compared_before_anything_of_an_announcement_is_used(bench: Bench) -> None:
    seen: list[list[bytes]] = []
    task = bench.run(announced(seen))
    bench.hear(1, signature="sum", given=seal_given(b"next"))
    bench.hear(2, signature="max", given=seal_given(b"last"))
    bench.end(Mismatch("they differ"))
    assert isinstance(error_of(task), Mismatch)
    assert (seen, bench.failed[0][1]) == ([], (2,))


def test_spoiled_bits_of_an_announcement_are_of_its_sender_and_nothing_of_it_is_used(bench: Bench) -> None:
    seen: list[list[bytes]] = []
    task = bench.run(announced(seen))
    given = bytearray(seal_given(b"next"))
    given[1] ^= 16
    bench.hear(2, signature="sum", given=seal_given(b"last"))
    bench.hear(1, signature="sum", given=bytes(given))
    error, ranks = bench.failed[0]
    assert isinstance(error, Corrupted)
    assert (error.rank, error.op, ranks) == (1, "all_reduce#0", (1,))
    assert "rank 1 (b) to rank 0 (a)" in str(error)
    bench.end(Corrupted("bits came spoiled", rank=1))
    assert isinstance(error_of(task), Corrupted)
    assert seen == []


def test_who_gives_another_size_than_its_call_breaks_the_rules_and_not_its_memory(bench: Bench) -> None:
    seen: list[list[bytes]] = []
    task = bench.run(announced(seen))
    bench.hear(1, signature="sum", given=seal_given(b"next"))
    bench.hear(2, signature="sum", given=seal_given(b"longer"))
    error, ranks = bench.failed[0]
    assert type(error) is PeerError
    assert (error.rank, error.node, ranks) == (2, "c", ())
    bench.end(error)
    assert isinstance(error_of(task), PeerError)
    assert seen == []


def test_calls_that_measure_wait_for_the_one_by_which_the_group_agrees(bench: Bench) -> None:
    seen: list[Known] = []

    def make(known: Known) -> Work:
        seen.append(known)
        return made(known)

    for _ in range(2):
        bench.run(Call("all_reduce", "all_reduce", make, measures=True))
    first, second = bench.messages(1)
    assert (len(first.measured), second.measured, seen) == (7, (), [])
    for rank in (1, 2):
        bench.communicator.announced(rank, Announce(VIEW_ID, 0, 0, "all_reduce", (), (RULES, 1, 1, 1, 9, 9, 9)))
    bench.turn()
    assert len(seen) == 2
    assert seen[0].network is seen[1].network is not None


# -- operations that fail --------------------------------------------------------------------------------------------


def test_a_rank_that_never_calls_is_named_when_the_deadline_passes(bench: Bench) -> None:
    task = bench.run(timeout=2.0)
    bench.hear(1)
    bench.turn(1.9)
    assert (task.done(), bench.failed) == (False, [])
    bench.turn(0.2)
    error = error_of(task)
    assert isinstance(error, PeerError)
    assert error.message == "rank 2 (c) did not call barrier#0 within 2 s"
    assert [(seen.message, ranks) for seen, ranks in bench.failed] == [(error.message, ())]
    assert is_over(bench)


def test_ranks_that_called_something_else_are_named_and_reported(bench: Bench) -> None:
    task = bench.run()
    bench.hear(2, signature="all_reduce")
    assert isinstance(bench.failed[0][0], Mismatch)
    assert bench.failed[0][1] == (2,)
    bench.end(Mismatch("the ranks called different things", view=VIEW_ID))
    error = error_of(task)
    assert isinstance(error, Mismatch)
    assert (error.message, error.rank, error.node) == ("the ranks called different things", 2, "c")
    assert isinstance(error.__cause__, Mismatch)


def test_callers_get_what_all_ranks_are_told_and_what_was_seen_here_is_its_cause(bench: Bench) -> None:
    task = bench.run()
    bench.all_call()
    bench.of("send").fail(LinkLost("silence", peer="b"))
    bench.turn()
    assert [(error.rank, error.lost) for error, _ in bench.failed] == [(1, ("b",))]
    assert not task.done()  # what all ranks are told has not come yet
    bench.end(PeerError("c was lost", rank=2, node="c", view=VIEW_ID, lost=("c",)))
    error = error_of(task)
    assert isinstance(error, PeerError)
    assert (error.rank, error.op, error.lost) == (2, "barrier#0", ("c",))
    assert isinstance(error.__cause__, PeerError)
    assert error.__cause__.rank == 1


def test_the_wait_for_what_all_are_told_ends_by_the_operations_own_deadline(bench: Bench) -> None:
    task = bench.run(timeout=3.0)
    bench.all_call()
    bench.of("send").fail(LinkLost("silence", peer="b"))
    bench.turn(2.9)
    assert not task.done()
    bench.turn(0.2)
    error = error_of(task)
    assert isinstance(error, PeerError)
    assert error.rank == 1


def test_the_wait_for_what_all_are_told_is_bounded_without_a_deadline(bench: Bench) -> None:
    bench.communicator.fail(PeerError("why", view=VIEW_ID))
    waiting = bench.loop.create_task(bench.communicator.end_of_view())
    bench.turn(4.9)
    assert not waiting.done()
    bench.turn(0.2)
    assert waiting.result() is bench.communicator.error


def test_a_consequence_waits_for_its_cause_and_is_not_reported_before_it(bench: Bench) -> None:
    task = bench.run(timeout=2.0)
    bench.all_call()
    bench.of("send").fail(MessageRefused("withdrawn", peer="b"))
    bench.turn(1.0)
    assert (bench.failed, task.done()) == ([], False)
    bench.end(Corrupted("bits came corrupted", rank=2, node="c", view=VIEW_ID))
    assert bench.failed == []
    assert isinstance(error_of(task), Corrupted)


def test_a_consequence_whose_cause_nobody_reports_is_reported_in_the_end(bench: Bench) -> None:
    task = bench.run(timeout=2.0)
    bench.all_call()
    bench.of("send").fail(MessageRefused("withdrawn", peer="b"))
    bench.turn(2.1)
    assert isinstance(error_of(task), PeerError)
    assert [error.rank for error, _ in bench.failed] == [1]


def test_all_whose_bits_came_corrupted_in_this_view_are_reported(bench: Bench) -> None:
    bench.run()
    bench.all_call()
    bench.links[2].stats.corrupt += 1
    bench.of("post").fail(MessageCorrupted(peer="b", sequence=1, expected=2, found=3))
    bench.turn()
    assert [(type(error), error.rank, ranks) for error, ranks in bench.failed] == [(Corrupted, 1, (1, 2))]


def test_what_a_caller_did_wrong_it_hears_at_once(bench: Bench) -> None:
    def wrong(known: Known) -> Work:
        raise LocalError("parts do not fit")

    task = bench.run(Call("scatter", "scatter", wrong))
    error = error_of(task)
    assert isinstance(error, LocalError)
    assert not error.usable  # others have seen the operation begin
    assert [type(seen) for seen, _ in bench.failed] == [LocalError]


def test_an_error_of_our_own_code_breaks_the_view_and_reaches_the_caller_as_it_is(bench: Bench) -> None:
    def wrong(known: Known) -> Work:
        raise KeyError("x")

    task = bench.run(Call("scatter", "scatter", wrong))
    assert isinstance(error_of(task), KeyError)
    assert [seen.message for seen, _ in bench.failed] == ["scatter#0 failed: KeyError: 'x'"]


def test_a_link_that_is_gone_before_the_announcement_is_a_failure_of_its_rank(bench: Bench) -> None:
    bench.links[2].error = LinkLost("silence", peer="c")
    bench.run()
    assert [(error.rank, error.lost) for error, _ in bench.failed] == [(2, ("c",))]


def test_cancelling_takes_transfers_back_and_breaks_the_view(bench: Bench) -> None:
    task = bench.run()
    task.cancel()
    bench.turn()
    assert task.cancelled()
    assert [error.message for error, _ in bench.failed] == ["barrier#0 was cancelled"]
    assert is_over(bench)
    assert bench.communicator.running == 0


# -- the end ---------------------------------------------------------------------------------------------------------


def test_it_breaks_once_ends_every_operation_and_receives_no_more(bench: Bench) -> None:
    tasks = [bench.run(), bench.run()]
    bench.communicator.fail(PeerError("first", view=VIEW_ID))
    bench.communicator.fail(PeerError("second", view=VIEW_ID))
    bench.turn()
    assert [error.message for error, _ in bench.failed] == ["first"]
    assert [link.discarded for link in bench.links.values()] == [[view_prefix(VIEW_ID)]] * 2
    assert is_over(bench)
    bench.end(Partitioned("cut off", view=VIEW_ID))
    bench.end(PeerError("another", view=VIEW_ID))
    assert [type(error_of(task)) for task in tasks] == [Partitioned, Partitioned]
    bench.hear(1, seq=5)
    assert [error.message for error, _ in bench.failed] == ["first"]


def test_what_is_called_after_the_end_raises_it_without_waiting(bench: Bench) -> None:
    bench.end(Partitioned("cut off", view=VIEW_ID))
    error = error_of(bench.run())
    assert isinstance(error, Partitioned)
    assert error.op == "barrier"
    assert (bench.log, bench.messages(1)) == ([], [])


def test_an_announcement_out_of_order_breaks_it(bench: Bench) -> None:
    task = bench.run()
    bench.all_call()
    for transfer in bench.log:
        transfer.go()
    bench.turn()
    task.result()
    bench.hear(1, seq=0)
    assert [error.message for error, _ in bench.failed] == ["announced operation 0 twice"]


# -- parting ---------------------------------------------------------------------------------------------------------


def test_who_leaves_waits_for_all_answers(bench: Bench) -> None:
    parting = bench.loop.create_task(bench.communicator.part(9.0))
    bench.turn()
    assert bench.messages(1) == bench.messages(2) == [Farewell(VIEW_ID)]
    bench.communicator.farewell(1, Farewell(VIEW_ID, done=True))
    bench.turn(1.0)
    assert not parting.done()
    bench.communicator.farewell(2, Farewell(VIEW_ID, done=True))
    bench.turn()
    parting.result()


def test_who_leaves_waits_no_longer_than_asked(bench: Bench) -> None:
    parting = bench.loop.create_task(bench.communicator.part(2.0))
    bench.turn(1.9)
    assert not parting.done()
    bench.turn(0.2)
    parting.result()


def test_who_leaves_does_not_wait_in_a_broken_view(bench: Bench) -> None:
    parting = bench.loop.create_task(bench.communicator.part(2.0))
    bench.turn()
    bench.communicator.fail(PeerError("why"))
    bench.turn()
    parting.result()


def test_who_leaves_is_answered_when_what_it_has_called_is_over_here(bench: Bench) -> None:
    bench.run()
    bench.all_call()
    bench.communicator.farewell(1, Farewell(VIEW_ID))
    assert len(bench.messages(1)) == 1
    for transfer in bench.log:
        transfer.go()
    bench.turn()
    assert bench.messages(1)[1:] == [Farewell(VIEW_ID, done=True)]
    assert len(bench.messages(2)) == 1


class Inquirer:
    """Stands for LateStacks: keeps whom it was to ask, and when."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []
        self.world: World

    def ask(self, view: View, ranks: list[int]) -> None:
        self.asked.append((self.world.elapsed_ns, ranks))

    def explain(self, error: QuicollError) -> None:
        error.add_note("where it was")


def test_who_has_not_called_is_asked_once_before_the_deadline_which_stays_what_it_was() -> None:
    late = Inquirer()
    with World(1) as world:
        late.world = world
        bench = Bench(world, late)
        began = world.elapsed_ns
        task = bench.run(timeout=2.0)
        bench.hear(1)
        bench.turn(1.4)
        assert late.asked == []
        bench.turn(0.2)
        assert [(at - began, ranks) for at, ranks in late.asked] == [(3 * S // 2, [2])]
        bench.turn(0.3)
        assert not bench.failed
        bench.turn(0.2)
        assert [type(error) for error, _ in bench.failed] == [PeerError]
        bench.end(PeerError("rank 2 is late", rank=2))
        assert error_of(task).__notes__ == ["where it was"]
        assert len(late.asked) == 1


def test_nobody_is_asked_where_an_operation_ends_in_time() -> None:
    late = Inquirer()
    with World(1) as world:
        late.world = world
        bench = Bench(world, late)
        task = bench.run(timeout=2.0)
        bench.all_call()
        bench.of("send").go()
        bench.of("post").arrive(bytes(8))
        bench.turn(3.0)
        assert task.result() == 0
        assert late.asked == []
