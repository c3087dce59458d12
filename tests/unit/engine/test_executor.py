"""One rank's plan over links: what it sends, posts and reduces, in which order, and how it fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_links import FakeLink, FakeTransfer, execute, nothing_copied

from quicoll.engine import executor
from quicoll.engine.calls import Work
from quicoll.engine.executor import TransferFailed
from quicoll.numerics.dtypes import DType
from quicoll.numerics.reduce import ReduceOp
from quicoll.plan import Buf, CopyStep, Lane, Pair, Plan, RecvStep, ReduceStep, Scratch, SendStep, Span
from quicoll_transport.errors import LinkLost, MessageCorrupted, MessageRefused
from quicoll_transport.sim import HostLoop, World

__all__ = ["nothing_copied"]

pytestmark = pytest.mark.usefixtures("nothing_copied")

FLOAT64 = DType.parse("float64")
IN, OUT = Span(Buf.INPUT, 0, 0, 2, False), Span(Buf.OUTPUT, 0, 0, 2, False)


@pytest.fixture
def world() -> Iterator[World]:
    with World(1) as made:
        yield made


class Run:
    """A plan of rank 0 under way on a simulated loop; `turn` lets all that is ready run."""

    def __init__(
        self,
        world: World,
        lanes: list[Lane],
        *,
        ranks: tuple[int, ...] = (0, 1, 2),
        width: int = 1,
        collective: str = "all_reduce",
        min_rtt_ns: int | None = None,
    ) -> None:
        self.world = world
        self.log: list[FakeTransfer] = []
        self.input, self.output = np.array([1.0, 2.0]), np.zeros(2)
        work = Work(
            replace(plan(lanes, width), collective=collective),
            FLOAT64,
            FLOAT64,
            ReduceOp.SUM,
            [self.input],
            self.output,
        )
        links: Any = {rank: FakeLink(rank, self.log, min_rtt_ns=min_rtt_ns) for rank in ranks}
        loop: HostLoop = world.host("a").start()
        self.task = loop.create_task(execute(work, links=links, ranks=ranks, prefix=b"prefix"))
        self.turn()

    def turn(self) -> None:
        self.world.run(limit_ns=0)

    @property
    def seen(self) -> list[str]:
        return [repr(transfer) for transfer in self.log]

    def of(self, kind: str, index: int) -> FakeTransfer:
        return next(transfer for transfer in self.log if (transfer.kind, transfer.index) == (kind, index))

    def failure(self) -> TransferFailed:
        self.turn()
        assert self.task.done()
        error = self.task.exception()
        assert isinstance(error, TransferFailed)
        return error


def plan(lanes: list[Lane], width: int) -> Plan:
    return Plan(
        collective="all_reduce",
        algorithm="direct",
        rank=0,
        world=3,
        lanes=tuple(lanes),
        inputs=(2,),
        output=2,
        leaves=2,
        itemsize=8,
        wide_itemsize=8,
        width=width,
        parameters=(),
    )


def scratch(slot: int) -> Span:
    return Span(Buf.SCRATCH, slot, 0, 2, False)


def reduction() -> Lane:
    """Receive from 1, add to the own input, send the sum to 2."""
    return Lane(
        (RecvStep(1, 4, scratch(0)), ReduceStep(OUT, Pair(IN, scratch(0)), True), SendStep(2, 5, OUT)),
        (Scratch(2, False),),
    )


def exchange(index: int) -> Lane:
    """Send to 1, receive from 2."""
    return Lane((SendStep(1, index, IN), RecvStep(2, index + 1, OUT)))


def corrupted() -> MessageCorrupted:
    return MessageCorrupted(peer="b", sequence=1, expected=2, found=3, tag=b"")


def lost() -> LinkLost:
    return LinkLost("silence", peer="b")


def test_memory_is_posted_first_and_a_step_waits_for_what_it_reads(world: World) -> None:
    run = Run(world, [reduction()])
    assert run.seen == ["post 4 rank 1"]
    run.of("post", 4).arrive(np.array([10.0, 20.0]).tobytes())
    run.turn()
    assert run.seen == ["post 4 rank 1", "send 5 rank 2"]
    assert run.of("send", 5).data == np.array([11.0, 22.0]).tobytes()
    assert not run.task.done()
    run.of("send", 5).go()
    run.turn()
    run.task.result()
    assert run.output.tolist() == [11.0, 22.0]


def test_a_lane_whose_result_is_there_makes_room_before_what_it_sent_is_acknowledged(world: World) -> None:
    run = Run(world, [exchange(2 * number) for number in range(7)])
    for number in range(4):  # all that are open
        run.of("post", 2 * number + 1).arrive(bytes(16))
    run.turn()
    assert [transfer.index for transfer in run.log if transfer.kind == "send"] == [0, 2, 4, 6, 8, 10, 12]
    for number in range(4, 7):
        run.of("post", 2 * number + 1).arrive(bytes(16))
    run.turn()
    assert not run.task.done()
    for transfer in run.log:
        if transfer.kind == "send":
            transfer.go()
    run.turn()
    run.task.result()


def test_no_more_than_one_lane_in_each_place_is_ahead_of_its_acknowledgements(world: World) -> None:
    run = Run(world, [exchange(2 * number) for number in range(13)])
    for number in range(8):
        run.of("post", 2 * number + 1).arrive(bytes(16))
        run.turn()
    assert [transfer.index for transfer in run.log if transfer.kind == "send"] == [2 * number for number in range(8)]
    run.of("send", 0).go()
    run.turn()
    assert run.log[-1].index == 16


def test_scratch_stays_with_its_lane_until_what_was_sent_of_it_is_acknowledged(world: World) -> None:
    lane = [
        Lane(
            (
                RecvStep(1, 2 * number, scratch(0)),
                ReduceStep(scratch(1), Pair(IN, scratch(0)), False),
                SendStep(2, 2 * number + 1, scratch(1)),
            ),
            (Scratch(2, False), Scratch(2, True)),
        )
        for number in range(5)
    ]
    run = Run(world, lane)
    run.of("post", 0).arrive(bytes(16))
    run.turn()
    assert run.seen[-1] == "send 1 rank 2"
    run.of("send", 1).go()
    run.turn()
    assert run.seen[-1] == "post 8 rank 1"


def test_a_failure_takes_back_what_earlier_lanes_have_sent(world: World) -> None:
    run = Run(world, [exchange(2 * number) for number in range(6)])
    run.of("post", 1).arrive(bytes(16))
    run.turn()
    run.of("post", 9).fail(lost())
    run.failure()
    assert run.of("send", 0).aborted


def test_a_message_is_named_by_the_operation_and_its_index(world: World) -> None:
    run = Run(world, [exchange(258)])
    assert [transfer.tag for transfer in run.log] == [b"prefix\x00\x00\x01\x03", b"prefix\x00\x00\x01\x02"]


def test_a_plan_of_a_sub_group_reaches_the_ranks_of_the_view(world: World) -> None:
    run = Run(world, [exchange(0)], ranks=(7, 4, 9))
    assert run.seen == ["post 1 rank 9", "send 0 rank 4"]


def test_results_arrive_in_the_output_and_copies_need_no_link(world: World) -> None:
    run = Run(world, [Lane((CopyStep(OUT, IN),))])
    run.task.result()
    assert run.output.tolist() == [1.0, 2.0]
    assert run.log == []


def test_a_plan_without_lanes_is_over_at_once(world: World) -> None:
    Run(world, []).task.result()


def test_lanes_open_in_order_as_many_as_the_plan_says(world: World) -> None:
    run = Run(world, [exchange(2 * number) for number in range(9)])
    first = plan([exchange(0)] * 9, 1).open_lanes
    assert 0 < first < 9
    assert len(run.log) == 2 * first
    for transfer in run.log[:2]:
        transfer.go()
    run.turn()
    assert run.seen[2 * first :] == [f"post {2 * first + 1} rank 2", f"send {2 * first} rank 1"]


def test_a_failure_ends_everything_though_the_lane_waits_for_another_message(world: World) -> None:
    run = Run(world, [reduction(), exchange(8)])
    run.of("send", 8).fail(lost())
    failure = run.failure()
    assert (failure.rank, failure.sending, failure.consequence) == (1, True, False)
    assert isinstance(failure.__cause__, LinkLost)
    assert all(transfer.done for transfer in run.log)


def test_of_failures_at_one_moment_the_lowest_rank_is_reported(world: World) -> None:
    run = Run(world, [exchange(0)])
    run.of("post", 1).fail(lost())
    run.of("send", 0).fail(lost())
    assert run.failure().rank == 1


def test_a_cause_is_reported_before_what_only_follows_from_one(world: World) -> None:
    run = Run(world, [exchange(0)])
    run.of("send", 0).fail(MessageRefused("withdrawn", peer="b"))
    run.of("post", 1).fail(lost())
    failure = run.failure()
    assert (failure.rank, failure.consequence) == (2, False)


@pytest.mark.parametrize(
    ("kind", "error", "consequence"),
    [
        ("send", MessageRefused("withdrawn", peer="b"), True),
        ("post", MessageRefused("withdrawn", peer="b"), True),
        ("send", corrupted(), True),
        ("post", corrupted(), False),
        ("send", LinkLost("silence", peer="b"), False),
    ],
)
def test_what_follows_from_a_failure_at_the_peer(world: World, kind: str, error: Any, consequence: bool) -> None:
    run = Run(world, [exchange(0)])
    run.of(kind, 0 if kind == "send" else 1).fail(error)
    assert run.failure().consequence is consequence


def test_nothing_goes_out_after_a_message_that_failed(world: World) -> None:
    run = Run(world, [reduction()])
    run.of("post", 4).fail(corrupted())
    run.failure()
    assert run.seen == ["post 4 rank 1"]
    assert run.output.tolist() == [0.0, 0.0]


def test_cancelling_takes_every_transfer_back(world: World) -> None:
    run = Run(world, [exchange(0), reduction()])
    run.of("send", 0).go()
    run.turn()
    run.task.cancel()
    run.turn()
    assert run.task.cancelled()
    assert [transfer.aborted for transfer in run.log] == [transfer is not run.of("send", 0) for transfer in run.log]


def test_an_error_of_the_computation_ends_everything(world: World) -> None:
    run = Run(world, [Lane((CopyStep(Span(Buf.INPUT, 3, 0, 2, False), IN),)), exchange(0)])
    assert isinstance(run.task.exception(), IndexError)
    assert all(transfer.aborted for transfer in run.log)


def test_a_short_message_is_copied_and_nobody_waits_for_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "INLINE_BYTES", 16)
    run = Run(world, [exchange(0)])
    assert run.seen == ["post 1 rank 2", "copy 0 rank 1"]
    assert run.of("copy", 0).data == np.array([1.0, 2.0]).tobytes()
    run.of("post", 1).arrive(bytes(16))
    run.turn()
    run.task.result()
    assert not run.of("copy", 0).done


def test_a_send_waits_until_even_the_shortest_message_has_arrived(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "INLINE_BYTES", 16)
    run = Run(world, [Lane((SendStep(1, 0, IN),))], collective="send")
    assert run.seen == ["send 0 rank 1"]
    assert not run.task.done()
    run.of("send", 0).go()
    run.turn()
    run.task.result()


def test_copies_of_one_operation_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "INLINE_BYTES", 16)
    monkeypatch.setattr(executor, "_MOST_COPIED", 40)
    run = Run(world, [exchange(2 * number) for number in range(3)])
    assert [transfer.kind for transfer in run.log if transfer.kind != "post"] == ["copy", "copy", "send"]


def test_a_message_above_the_bound_is_read_in_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "INLINE_BYTES", 15)
    assert Run(world, [exchange(0)]).seen == ["post 1 rank 2", "send 0 rank 1"]


def far_run(world: World, lanes: list[Lane], **options: Any) -> Run:
    return Run(world, lanes, min_rtt_ns=50_000_000, **options)


def test_a_plan_over_a_far_link_ends_with_its_result_and_leaves_the_last_message_to_the_link(world: World) -> None:
    run = far_run(world, [exchange(0)])
    run.input[:] = 7.0  # as the caller may once it has the result
    run.of("post", 1).arrive(bytes(16))
    run.turn()
    run.task.result()
    sent = run.of("send", 0)
    assert not sent.done
    assert bytes(sent.memory) == np.array([1.0, 2.0]).tobytes()


def test_over_a_near_link_the_last_message_is_awaited(world: World) -> None:
    run = Run(world, [exchange(0)], min_rtt_ns=1_000_000)
    run.of("post", 1).arrive(bytes(16))
    run.turn()
    assert not run.task.done()


def test_over_a_far_link_a_lane_that_only_sends_is_awaited_too(world: World) -> None:
    run = far_run(world, [Lane((SendStep(1, 0, IN),))])
    assert not run.task.done()
    run.of("send", 0).go()
    run.turn()
    run.task.result()


def test_over_a_far_link_a_message_of_scratch_is_awaited_too(world: World) -> None:
    run = far_run(world, [Lane((RecvStep(1, 1, scratch(0)), SendStep(2, 0, scratch(0))), (Scratch(2, False),))])
    run.of("post", 1).arrive(bytes(16))
    run.turn()
    assert not run.task.done()
    run.of("send", 0).go()
    run.turn()
    run.task.result()


def test_messages_to_a_far_rank_hold_back_the_lanes_behind_them(world: World) -> None:
    run = far_run(world, [exchange(2 * number) for number in range(13)])
    for number in range(8):
        run.of("post", 2 * number + 1).arrive(bytes(16))
        run.turn()
    assert [transfer.index for transfer in run.log if transfer.kind == "send"] == [2 * number for number in range(8)]


def test_what_was_kept_is_taken_back_with_a_plan_that_fails(world: World) -> None:
    run = far_run(world, [exchange(2 * number) for number in range(2)])
    run.of("post", 1).arrive(bytes(16))
    run.of("post", 3).fail(lost())
    run.failure()
    assert run.of("send", 0).aborted
    assert run.of("send", 2).aborted


def test_a_failed_message_ends_a_plan_that_still_runs_though_it_was_kept(world: World) -> None:
    run = far_run(world, [exchange(0)])
    run.of("send", 0).fail(corrupted())
    assert isinstance(run.failure().error, MessageCorrupted)


def test_nobody_hears_of_a_kept_message_that_fails_behind_the_plan(world: World) -> None:
    run = far_run(world, [exchange(0)])
    run.of("post", 1).arrive(bytes(16))
    run.turn()
    run.of("send", 0).fail(corrupted())
    run.turn()
    run.task.result()


def test_bytes_that_are_kept_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_MOST_KEPT", 16)
    run = far_run(world, [exchange(0), exchange(2)])
    for index in (1, 3):
        run.of("post", index).arrive(bytes(16))
    run.turn()
    assert not run.task.done()
    run.of("send", 2).go()
    run.turn()
    run.task.result()
    assert not run.of("send", 0).done
