"""Who comes to a rank's memory, and who does not."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import quicoll.local.meeting
from quicoll.local.layout import SegmentLayout
from quicoll.local.meeting import MOST_SILENT, MeetingFailed, MeetingPlace, Met, listen, meet_all
from quicoll.local.memory import Segment
from quicoll.local.sealing import unusable

pytestmark = [pytest.mark.loopback, pytest.mark.skipif(bool(unusable()), reason=unusable() or "usable")]

LAYOUT = SegmentLayout.of_ranks(2)


@dataclass
class Side:
    """One rank of two, with what it brings."""

    rank: int
    server: socket.socket
    name: bytes
    secret: bytes
    fds: list[int] = field(default_factory=list)
    found: dict[int, Met] = field(default_factory=dict)
    error: MeetingFailed | None = None

    def meet(self, other: Side, *, secret: bytes | None = None, within: float = 30.0) -> None:
        peer = 1 - self.rank
        try:
            self.found = meet_all(
                self.server,
                view_id=7,
                rank=self.rank,
                places={peer: MeetingPlace(other.name, other.secret if secret is None else secret)},
                secrets={peer: self.secret},
                descriptors=self.fds,
                within=within,
            )
        except MeetingFailed as error:
            self.error = error


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    made = []
    for rank in range(2):
        server, name = listen()
        _, descriptor = Segment.make(LAYOUT)
        made.append(Side(rank, server, name, bytes([rank]) * 32, [descriptor, os.eventfd(0), os.eventfd(0)]))
    yield made
    for side in made:
        side.server.close()
        for descriptor in side.fds:
            os.close(descriptor)
        for met in side.found.values():
            met.close()


def together(*work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_ranks_with_both_secrets_get_each_others_segments_which_they_can_only_read(sides: list[Side]) -> None:
    one, other = sides
    together(lambda: one.meet(other), lambda: other.meet(one))
    assert (one.error, other.error) == (None, None)
    met = one.found[1].segment
    segment = Segment.received(met, LAYOUT)
    with pytest.raises(TypeError):
        segment.data[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(met, LAYOUT.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.ftruncate(met, 4096)
    with pytest.raises(PermissionError):
        os.write(met, b"x")


def test_who_does_not_know_the_secrets_gets_nothing_and_does_not_end_the_meeting_of_others(sides: list[Side]) -> None:
    one, other = sides
    stranger = Side(1, other.server, b"", b"x" * 32, other.fds)

    def first_the_stranger() -> None:
        stranger.meet(one, secret=b"y" * 32)
        other.meet(one)

    together(lambda: one.meet(other), first_the_stranger)
    assert stranger.error is not None
    assert stranger.found == {}
    assert (one.error, other.error) == (None, None)


def test_who_hangs_up_or_names_no_rank_of_the_view_is_no_rank(sides: list[Side]) -> None:
    one, other = sides

    def strangers() -> None:
        for said in (
            b"",
            b"\xff" * 40,
            bytes(40),
            bytes([1, *bytes(39)]),
            b"much more than a rank's number and proof" * 2,
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(one.name)
                if said:
                    sock.send(said)
        other.meet(one)

    together(lambda: one.meet(other), strangers)
    assert (one.error, other.error) == (None, None)


@pytest.mark.parametrize("silent", [1, MOST_SILENT, MOST_SILENT + 20])
def test_strangers_of_the_same_user_who_dial_and_say_nothing_cost_the_meeting_nothing(
    sides: list[Side], silent: int
) -> None:
    """They stay until it has ended. Of more than there is room for the first are hung up."""
    one, other = sides

    def strangers_first() -> None:
        lines = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(silent)]
        for line in lines:
            line.connect(one.name)
        other.meet(one)
        for line in lines:
            line.close()

    together(lambda: one.meet(other), strangers_first)
    assert (one.error, other.error) == (None, None)


def test_where_more_have_dialled_than_the_kernel_lets_wait_a_rank_dials_again(sides: list[Side]) -> None:
    one, other = sides
    lines: list[socket.socket] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            lines.append(line)
            line.setblocking(False)
            line.connect(one.name)
    together(lambda: one.meet(other), lambda: other.meet(one))
    for line in lines:
        line.close()
    assert (one.error, other.error) == (None, None)


def test_who_has_named_a_rank_and_then_is_silent_is_not_waited_for(sides: list[Side]) -> None:
    one, other = sides

    def stranger_first() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(one.name)
            line.send(bytes([1, *bytes(39)]))
            other.meet(one)

    together(lambda: one.meet(other), stranger_first)
    assert (one.error, other.error) == (None, None)


def test_a_rank_that_does_not_come_is_named_and_nothing_is_left_open(sides: list[Side]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sides[0].meet(sides[1], within=0.01)
    assert "rank 1 not met" in str(sides[0].error)
    sides[0].server.close()
    sides[1].meet(sides[0], within=0.01)
    assert "rank 0 not met" in str(sides[1].error)
    assert len(os.listdir("/proc/self/fd")) == before - 1


class Ended(BaseException):
    """What becomes of a rank whose process ends: the kernel closes what it had, as `meet_all` does on its way out."""


@pytest.mark.slow
@pytest.mark.parametrize("ending", range(3))
def test_a_rank_that_ends_before_any_of_its_steps_leaves_nothing_open_anywhere(
    ending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others meet all, or know that they have not, by their deadline; whatever came is closed."""
    answer = quicoll.local.meeting._Sockets.answer
    steps = 0

    def ends(sockets: Any, step: Any) -> Any:
        nonlocal steps
        if threading.current_thread().name == str(ending):
            steps += 1
            if steps == last:
                raise Ended
        return answer(sockets, step)

    monkeypatch.setattr(quicoll.local.meeting._Sockets, "answer", ends)
    for last in range(1, 21):
        steps = 0
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        told: dict[int, dict[int, Met] | BaseException] = {}
        servers = [listen() for _ in range(3)]
        given = [[os.eventfd(0) for _ in range(3 + rank % 2)] for rank in range(3)]  # one has an arena

        def meet(rank: int, servers: Any = servers, given: Any = given, told: Any = told) -> None:
            others = [peer for peer in range(3) if peer != rank]
            try:
                told[rank] = meet_all(
                    servers[rank][0],
                    view_id=7,
                    rank=rank,
                    places={peer: MeetingPlace(servers[peer][1], bytes([peer, rank]) * 16) for peer in others},
                    secrets={peer: bytes([rank, peer]) * 16 for peer in others},
                    descriptors=given[rank],
                    within=0.2,
                )
            except (MeetingFailed, Ended) as error:
                told[rank] = error
            servers[rank][0].close()

        threads = [threading.Thread(target=meet, args=(rank,), name=str(rank)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank, found in told.items():
            if isinstance(found, dict):
                assert sorted(found) == [peer for peer in range(3) if peer != rank]
                for met in found.values():
                    met.close()
        for each in given:
            for descriptor in each:
                os.close(descriptor)
        assert sorted(told) == [0, 1, 2]
        assert isinstance(told[ending], Ended if steps == last else dict | MeetingFailed)
        if last < 7 and steps == last:  # it has given nobody what it brought
            assert not any(isinstance(found, dict) for found in told.values())
        told.clear()
        assert len(os.listdir("/proc/self/fd")) == before


def test_no_socket_is_dialled_that_is_not_named_like_ours(sides: list[Side]) -> None:
    one, other = sides
    one.name = b"/run/other.sock"
    other.meet(one)
    assert "names no socket of ours" in str(other.error)


def test_a_segment_that_could_be_changed_or_cut_short_is_refused() -> None:
    for seals in (0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE):
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, LAYOUT.size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(ValueError, match="not sealed"):
            Segment.received(descriptor, LAYOUT)
        os.close(descriptor)
    _, descriptor = Segment.make(LAYOUT)
    with pytest.raises(ValueError, match="another size"):
        Segment.received(descriptor, SegmentLayout.of_ranks(3))
    os.close(descriptor)
