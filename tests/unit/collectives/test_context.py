"""Issuing: in which order operations reach the engine, what a step votes with, and what an audit is told."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.audit.log import AuditLog, OperationRecord, read_log
from quicoll.audit.recorder import Auditor
from quicoll.collectives.base import GroupView
from quicoll.collectives.context import CallContext, Pending
from quicoll.collectives.handle import BlockingHandle, Handle
from quicoll.collectives.movements import Barrier, Broadcast, Gather
from quicoll.collectives.point_to_point import Send
from quicoll.collectives.reductions import AllReduce, Reduce, ReduceScatter
from quicoll.collectives.shards import Shards
from quicoll.collectives.subgroups import STATE, WORLD, Scope
from quicoll.engine.given import open_given
from quicoll.errors import AuditError, LocalError, Mismatch, PeerError
from quicoll.membership.view import Member, View
from quicoll.numerics.destinations import IN_PLACE_BYTES

if TYPE_CHECKING:
    from quicoll.collectives.operation import Operation
    from quicoll.engine.answers import Start
    from quicoll.engine.calls import Call


class Engine:
    """Takes operations and leaves their end to the test: nothing is sent."""

    endpoint = None  # which sends what is begun: nothing is

    def __init__(self) -> None:
        self.calls: list[tuple[Call, dict[str, Any]]] = []

    def collective(self, view_id: int, call: Call, ended: Any, **how: Any) -> None:
        self.calls.append((call, how))


class Runtime:
    """Keeps what is issued, with the future that its caller got."""

    def __init__(self) -> None:
        self.futures: list[Any] = []
        self.refused = ""
        self.waited: list[float | None] = []

    def _take(self, future: Any) -> Any:
        if self.refused:
            raise LocalError(self.refused)
        self.futures.append(future)
        return future

    def begin(self, start: Start, sender: object, loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Future[Any]:
        taken: asyncio.Future[Any] = self._take(asyncio.get_running_loop().create_future())
        return taken

    def submit(self, start: Start, sender: object) -> concurrent.futures.Future[Any]:
        taken: concurrent.futures.Future[Any] = self._take(concurrent.futures.Future())
        return taken

    def wait(self, answer: concurrent.futures.Future[Any], timeout: float | None) -> bool:
        self.waited.append(timeout)
        return answer.done()


def view(number: int = 1) -> View:
    members = (Member(rank=0, node="a", incarnation=1), Member(rank=1, node="b", incarnation=1))
    return View(view_id=number, members=members, seed=bytes(32), committed_step=0, committed_view=0)


class Desk:
    """A context without an engine. `ended(k)` ends the k-th operation that was issued."""

    def __init__(self) -> None:
        self.runtime, self.engine = Runtime(), Engine()
        config = SimpleNamespace(node="b", timeout=30.0)
        self.context = CallContext(config, self.engine, self.runtime, view())
        self.seq = 0

    def operation(self, x: float = 1.0, scope: Scope = WORLD) -> AllReduce:
        return AllReduce(self.here(scope), np.full(2, x))

    def here(self, scope: Scope = WORLD) -> GroupView:
        ranks = (0, 1) if scope.ranks is None else scope.ranks
        return GroupView(1, scope, len(ranks) - 1, ranks, (0,) * len(ranks), 1024)

    def submit(self, x: float = 1.0, scope: Scope = WORLD) -> Pending[Any]:
        return self.context.issue(self.operation(x, scope), None, threaded=True)

    def end(self, pending: Pending[Any], seq: int, value: float = 2.0) -> None:
        if isinstance(pending.operation, AllReduce):
            pending.operation.output[:] = value
        pending.future.set_result(seq)


LARGE = IN_PLACE_BYTES // 8  # of float64


def test_counts_that_no_message_holds_are_refused_before_anything_is_sent() -> None:
    desk = Desk()
    with pytest.raises(LocalError, match="more than can be announced"):
        desk.context.issue(Gather(desk.here(), np.empty((1 << 62, 0), np.uint8)), None, threaded=True)
    assert desk.runtime.futures == []


def test_what_is_announced_is_what_was_there_when_the_call_was_made() -> None:
    desk, x = Desk(), np.ones(2)
    starts: list[Start] = []

    def begin(start: Start, sender: object) -> concurrent.futures.Future[Any]:
        starts.append(start)
        return concurrent.futures.Future()

    desk.runtime.submit = begin
    desk.context.issue(AllReduce(desk.here(), x), None, threaded=True)
    x[:] = 7
    starts[0](lambda number, error: None)
    ((call, _),) = desk.engine.calls
    assert open_given(call.given, x.nbytes, 0) == np.ones(2).tobytes()


def test_what_an_operation_writes_meanwhile_is_given_to_no_other_until_its_result_is_taken() -> None:
    desk = Desk()
    x, out = np.ones(LARGE), np.zeros(LARGE)

    def operations() -> list[Operation[Any]]:
        here = desk.here()
        return [
            AllReduce(here, out),
            AllReduce(here, x, out=out),
            AllReduce(here, [np.ones(3), out[5:]]),
            Broadcast(here, x, out=out[:]),
            Gather(here, out[-2:]),
            Send(here, out[:1], to=0),
        ]

    first = desk.context.issue(AllReduce(desk.here(), x, out=out), None, threaded=True)
    assert first.operation.in_place
    for ended in (False, True):
        for operation in operations():
            with pytest.raises(LocalError, match="is given memory that an all_reduce under way writes its result to"):
                desk.context.issue(operation, None, threaded=True)
        if not ended:
            desk.end(first, 0)
    assert first.take() is out
    for operation in operations():
        desk.context.issue(operation, None, threaded=True)
    assert len(desk.runtime.futures) == 1 + 6


@pytest.mark.parametrize("how", ["failed", "cancelled", "dropped"])
def test_memory_of_an_operation_that_is_over_can_be_used_again(how: str) -> None:
    desk = Desk()
    out = np.zeros(LARGE)
    pending = desk.context.issue(AllReduce(desk.here(), np.ones(LARGE), out=out), None, threaded=True)
    if how == "failed":
        pending.future.set_exception(PeerError("lost"))
    elif how == "cancelled":
        pending.future.cancel()
    else:
        desk.end(pending, 0)
        del pending
        desk.runtime.futures.clear()
    again = desk.context.issue(AllReduce(desk.here(), np.ones(LARGE), out=out), None, threaded=True)
    assert again.operation.in_place


def test_what_travels_in_an_announcement_was_copied_and_its_memory_may_be_written_but_for_an_out() -> None:
    desk = Desk()
    whole = np.zeros(LARGE)
    for given, out, in_place in ((whole[:4], None, True), (np.ones(4), whole[:4], False)):
        small = desk.context.issue(AllReduce(desk.here(), given, out=out), None, threaded=True)
        assert small.operation.sealed
        large = desk.context.issue(AllReduce(desk.here(), np.ones(LARGE), out=whole), None, threaded=True)
        assert large.operation.in_place is in_place
        large.future.set_exception(PeerError("lost"))


def test_where_nobody_writes_in_place_what_is_in_flight_is_not_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    with monkeypatch.context() as patch:
        patch.setattr(desk.context, "_separate", lambda operation: pytest.fail("gone through"))
        held = [desk.submit() for _ in range(5)]
    writing = desk.context.issue(AllReduce(desk.here(), np.ones(LARGE), out=np.zeros(LARGE)), None, threaded=True)
    gone_through: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(desk.context, "_separate", gone_through.append)
        held.append(desk.submit())
    assert gone_through == [held[-1].operation]
    desk.end(writing, 5)
    writing.take()
    with monkeypatch.context() as patch:
        patch.setattr(desk.context, "_separate", lambda operation: pytest.fail("gone through"))
        held.append(desk.submit())


def test_an_out_that_an_earlier_operation_reads_or_will_write_is_left_alone_until_the_end() -> None:
    given = np.ones(LARGE)
    for earlier in (
        lambda here: AllReduce(here, given),
        lambda here: AllReduce(here, np.ones(2), out=given[:2]),
        lambda here: Send(here, given[-1:], to=0),
        lambda here: AllReduce(here, Shards(2, 1, 1, 1).leaves([given])),
    ):
        desk = Desk()
        first = desk.context.issue(earlier(desk.here()), None, threaded=True)
        second = desk.context.issue(AllReduce(desk.here(), np.ones(LARGE), out=given), None, threaded=True)
        assert not second.operation.in_place
        desk.end(second, 1, 5.0)
        assert given[0] == 1
        assert second.take() is given
        assert given[-1] == 5
        given[:] = 1
        del first


def test_an_operation_whose_inputs_and_out_share_memory_leaves_it_alone() -> None:
    given = np.ones(2 * LARGE)
    here = Desk().here()
    for operation in (
        AllReduce(here, given, out=given),
        AllReduce(here, given[::2], out=given[:LARGE]),
        AllReduce(here, Shards(3, 1, 2, 1).leaves([np.ones(2 * LARGE), given]), out=given),
        Reduce(here, given, root=1, out=given),
        ReduceScatter(here, given, out=given[LARGE:]),
    ):
        assert not operation.in_place
    assert Reduce(here, given, root=1, out=np.ones(2 * LARGE)).in_place
    assert not Reduce(here, given, root=0, out=np.ones(2 * LARGE)).in_place
    assert ReduceScatter(here, given, out=np.ones(LARGE)).in_place


async def test_a_cancelled_wait_is_for_the_engine_where_it_reads_or_writes_what_is_the_callers() -> None:
    desk = Desk()
    here = desk.here()
    reads = (AllReduce(here, np.ones(LARGE)), ReduceScatter(here, np.ones(LARGE)), Reduce(here, np.ones(LARGE), root=1))
    assert all(desk.context.issue(operation, None).released is not None for operation in reads)
    small = AllReduce(here, np.ones(2))  # which is copied, and travels in its announcement
    assert desk.context.issue(small, None).released is None
    assert small.sealed
    assert desk.context.issue(Barrier(here), None).released is None


async def test_a_cancelled_wait_ends_when_nobody_writes_the_out_any_more() -> None:
    desk = Desk()
    pending = desk.context.issue(AllReduce(desk.here(), np.ones(LARGE), out=np.zeros(LARGE)), None)
    released = pending.released = concurrent.futures.Future()
    waiting = asyncio.ensure_future(Handle(pending))
    await asyncio.sleep(0)
    waiting.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    released.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_an_operation_is_taken_once_and_gives_the_same_result_each_time() -> None:
    desk = Desk()
    pending = desk.submit()
    assert not pending.settle()
    desk.end(pending, 0)
    assert pending.settle()
    assert pending.take() is pending.take()
    assert pending.take().tolist() == [2.0, 2.0]


def test_what_a_step_votes_with_follows_from_the_numbers_and_not_from_the_order_of_the_waits() -> None:
    votes = []
    for order in ((0, 1, 2), (2, 0, 1)):
        desk = Desk()
        desk.context.open(1)
        pendings = [desk.submit(float(number)) for number in range(3)]
        for number in order:
            desk.end(pendings[number], number, float(number))
            if number:  # the first is left to the step's end
                pendings[number].take()
        assert desk.context.settle() == ()
        votes.append(desk.context.digests(1))
    assert votes[0] == votes[1]
    desk.context.record(0, 2, b"another result..")
    assert desk.context.digests(1) != votes[0]


def test_a_step_counts_what_has_not_ended_and_forgets_what_comes_later() -> None:
    desk = Desk()
    desk.context.open(1)
    first, second = desk.submit(), desk.submit()
    desk.end(first, 0)
    assert desk.context.settle() == ("all_reduce",)
    before = desk.context.digests(1)
    desk.context.close()
    desk.end(second, 1)
    second.take()
    assert desk.context.digests(1) == before
    desk.context.open(2)
    assert desk.context.digests(2)[1] == ()
    assert desk.context.settle() == ()


def test_results_of_a_sub_group_have_a_digest_of_their_own() -> None:
    desk = Desk()
    desk.context.open(1)
    mine = WORLD.sub(0, 5, (1,), 0, view_id=1)
    whole, _ = desk.context.digests(1)
    pending = desk.submit(scope=mine)
    desk.end(pending, 0)
    pending.take()
    unchanged, groups = desk.context.digests(1)
    assert (unchanged, [group for group, _ in groups]) == (whole, [mine.group_id])


def test_threads_that_issue_at_once_take_one_place_after_the_other() -> None:
    desk = Desk()
    desk.context.open(1)
    start = threading.Barrier(8)

    def issue() -> list[Pending[Any]]:
        start.wait()
        return [desk.submit() for _ in range(50)]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        issued = [pending for done in [threads.submit(issue) for _ in range(8)] for pending in done.result()]
    assert len(desk.runtime.futures) == 400
    by_future = {id(pending.future): pending for pending in issued}
    for seq, future in enumerate(desk.runtime.futures):
        desk.end(by_future[id(future)], seq)
    assert desk.context.settle() == ()


@pytest.mark.slow
def test_the_child_of_a_fork_is_refused_whatever_the_parent_was_doing() -> None:
    desk = Desk()
    pending = desk.submit()
    desk.end(pending, 0)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with desk.context.lock:
            held.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            for call in (desk.submit, BlockingHandle(pending).wait):
                with pytest.raises(LocalError, match="a fork of the one that joined"):
                    call()
            os.write(write, b"refused")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.read() == "refused"
    os.waitpid(child, 0)
    go_on.set()
    thread.join()


def test_an_event_loop_is_needed_to_issue_and_none_to_submit() -> None:
    desk = Desk()
    with pytest.raises(LocalError, match=r"asyncio\.run_coroutine_threadsafe takes one there"):
        desk.context.issue(desk.operation(), None)
    assert not desk.runtime.futures
    with pytest.raises(LocalError, match="timeout must be above 0"):
        desk.context.issue(desk.operation(), 0, threaded=True)
    assert not desk.runtime.futures


async def test_a_handle_gives_the_result_and_the_error_of_its_operation() -> None:
    desk = Desk()
    good = Handle(desk.context.issue(desk.operation(), None))
    bad = Handle(desk.context.issue(desk.operation(), None))
    assert not good.done()
    desk.end(good.pending, 0)
    bad.pending.future.set_exception(Mismatch("different calls"))
    assert (await good).tolist() == [2.0, 2.0]
    with pytest.raises(Mismatch, match="different calls"):
        await bad
    cancelled = Handle(desk.context.issue(Barrier(desk.here()), None))
    cancelled.pending.future.cancel()
    with pytest.raises(PeerError, match="cancelled by another await") as raised:
        await cancelled
    assert (raised.value.rank, raised.value.node, raised.value.view, raised.value.op) == (1, "b", 1, "barrier")


def test_a_blocking_handle_gives_the_result_and_the_error_of_its_operation() -> None:
    desk = Desk()
    pending = desk.submit()
    handle: BlockingHandle[Any] = BlockingHandle(pending)
    with pytest.raises(TimeoutError, match=r"all_reduce has not ended within 1\.5 s"):
        handle.wait(1.5)
    assert desk.runtime.waited == [1.5]
    desk.end(pending, 0)
    assert handle.wait().tolist() == [2.0, 2.0]
    assert desk.runtime.waited == [1.5]  # what has ended is not waited for
    failed = desk.submit()
    failed.future.set_exception(Mismatch("different calls"))
    with pytest.raises(Mismatch, match="different calls"):
        BlockingHandle(failed).wait()


def test_a_step_uses_no_more_sub_groups_than_its_vote_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quicoll.collectives.context.MAX_GROUPS", 2)
    desk = Desk()
    desk.context.open(1)
    groups = [WORLD.sub(0, color, (1,), 0, view_id=1) for color in range(3)]
    for scope in (*groups[:2], groups[0]):
        desk.submit(scope=scope)
    with pytest.raises(LocalError, match="at most 2 sub-groups"):
        desk.submit(scope=groups[2])
    # One whose result is a rank's own is in no vote.
    desk.context.issue(Gather(desk.here(groups[2]), np.ones(1), root=0), None, threaded=True)


def test_an_id_belongs_to_one_name_for_as_long_as_the_view() -> None:
    context = Desk().context
    context.claim(9, "0:1")
    context.claim(9, "0:1")
    with pytest.raises(LocalError, match="have the same id"):
        context.claim(9, "0:2")
    context.split_issued(0)
    assert (context.next_split(0), context.next_split(9)) == (1, 0)
    context.enter(view(1))
    assert context.next_split(0) == 1
    context.enter(view(2))
    context.claim(9, "0:2")
    assert context.next_split(0) == 0


class Audited(Desk):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.path = directory / "b.audit"
        self.context.auditor = Auditor(AuditLog(self.path, job="test", node="b"))

    @property
    def written(self) -> list[int]:
        return [line.seq for line in read_log(self.path).lines if isinstance(line, OperationRecord)]


def test_an_audit_is_told_of_operations_that_no_thread_waited_for(tmp_path: Path) -> None:
    desk = Audited(tmp_path)
    first, second, third = (desk.submit() for _ in range(3))
    desk.end(first, 0)
    second.future.set_exception(Mismatch("different calls"))
    desk.end(third, 2)
    assert desk.written == []
    fourth = desk.submit()  # looks after what has ended
    assert desk.written == [0, 2]
    desk.end(fourth, 3)
    desk.submit(scope=STATE)  # the library's own is left out
    desk.context.close_down()
    assert desk.written == [0, 2, 3]


def test_an_operation_that_the_engine_refuses_leaves_no_place_in_the_audit(tmp_path: Path) -> None:
    desk = Audited(tmp_path)
    desk.runtime.refused = "the engine is closed"
    with pytest.raises(LocalError, match="the engine is closed"):
        desk.submit()
    desk.runtime.refused = ""
    pending = desk.submit()
    desk.end(pending, 0)
    pending.take()
    assert desk.written == [0]
    desk.context.close_down()


def test_an_audit_that_failed_refuses_the_next_operation(tmp_path: Path) -> None:
    desk = Audited(tmp_path)
    pending = desk.submit()
    desk.context.close_down()
    desk.end(pending, 0)
    pending.take()
    with pytest.raises(AuditError):
        desk.submit()
