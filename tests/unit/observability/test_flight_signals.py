"""SIGUSR1 has a flight recorder's file written, unless the program has another use for it."""

from __future__ import annotations

import os
import signal

from quicoll.observability.flight import FlightRecorder
from quicoll.observability.flight_record import LateStack
from quicoll.observability.flight_signals import sigusr1_records


def recorder() -> FlightRecorder:
    return FlightRecorder(job="job", node="a", process="1", clock="c", host="h", now_ns=lambda: 1, wall_ns=lambda: 2)


def test_who_sends_it_gets_a_file_with_the_stacks_of_the_process() -> None:
    flight = recorder()
    kept: list[str] = []
    flight.keep = lambda: kept.append(flight.snapshot().header.why)
    with sigusr1_records(flight):
        os.kill(os.getpid(), signal.SIGUSR1)
        (stack,) = flight.snapshot().of(LateStack)
    assert kept[-1] == "asked for by SIGUSR1"
    assert stack.node == "a"
    assert "in test_who_sends_it_gets_a_file_with_the_stacks_of_the_process" in stack.text
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_program_that_handles_it_keeps_it() -> None:
    heard: list[int] = []
    flight = recorder()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with sigusr1_records(flight):
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]
    assert flight.snapshot().of(LateStack) == []
