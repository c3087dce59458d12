"""A rank that is asked to stop: what is woken, what a signal does, and that nothing is left behind in the process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quicoll.errors import LocalError, Terminated
from quicoll.stop import StopRequest, sigterm_asks, sigterm_tells


@pytest.fixture(autouse=True)
def default_action() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def handler() -> object:
    return signal.getsignal(signal.SIGTERM)


async def waits_for_ever(request: StopRequest) -> str:
    """How the wait ended. A SystemExit that leaves a task would end the whole loop."""
    try:
        with request.interrupting():
            await asyncio.Event().wait()
    except Terminated:
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return "terminated"
    return "done"


async def waiting(request: StopRequest) -> asyncio.Task[str]:
    task = asyncio.create_task(waits_for_ever(request))
    await asyncio.sleep(0)
    return task


def test_it_ends_the_process_as_sigterm_does_and_no_handler_of_errors_takes_it_for_one() -> None:
    assert Terminated().code == 128 + signal.SIGTERM
    assert not issubclass(Terminated, Exception)


async def test_a_wait_ends_at_once_when_it_is_asked_for() -> None:
    request = StopRequest()
    task = await waiting(request)
    request.ask()
    assert await task == "terminated"


async def test_asked_by_another_thread_it_wakes_the_loop() -> None:
    request = StopRequest()
    task = await waiting(request)
    await asyncio.to_thread(request.ask)
    assert await task == "terminated"


async def test_asked_before_nothing_is_awaited() -> None:
    request = StopRequest()
    request.ask()
    with pytest.raises(Terminated), request.interrupting():
        pytest.fail("the block was entered")


async def test_a_wait_that_is_over_is_not_interrupted_later() -> None:
    request = StopRequest()
    with request.interrupting():
        await asyncio.sleep(0)
    request.ask()
    await asyncio.sleep(0)  # would raise the CancelledError of a late interruption
    assert request.asked


async def test_a_cancellation_from_outside_stays_one() -> None:
    request = StopRequest()
    first, second = await waiting(request), await waiting(StopRequest())
    request.ask()
    for task in (first, second):
        task.cancel("by its owner")
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_error_on_the_way_out_of_the_wait_is_not_hidden() -> None:
    request = StopRequest()

    async def fails() -> None:
        with request.interrupting():
            try:
                await asyncio.Event().wait()
            finally:
                raise ZeroDivisionError

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    request.ask()
    with pytest.raises(ZeroDivisionError):
        await task


def test_asked_after_the_loop_is_closed_it_is_noted_and_nothing_else() -> None:
    request = StopRequest()

    async def never_left() -> None:
        block.enter_context(request.interrupting())

    block = ExitStack()
    asyncio.run(never_left())
    request.ask()
    assert request.asked


async def test_a_wait_may_go_on_for_a_while_after_it_is_asked_for() -> None:
    for asked_before in (True, False):
        request = StopRequest()
        if asked_before:
            request.ask()
        with request.interrupting(after=60.0):
            request.ask()
            await asyncio.sleep(0.001)
        with pytest.raises(Terminated), request.interrupting(after=0.001):
            await asyncio.Event().wait()


async def test_who_waits_to_be_asked_is_called_on_its_loop_at_once_if_it_was_and_not_after_it_is_taken_back() -> None:
    request, heard = StopRequest(), []
    loop = asyncio.get_running_loop()
    forget = request.on_ask(loop, lambda: heard.append("taken back"))
    request.on_ask(loop, lambda: heard.append("first"))
    forget()
    request.ask()
    assert heard == []
    await asyncio.sleep(0)
    request.on_ask(loop, lambda: heard.append("late"))
    await asyncio.sleep(0)
    assert heard == ["first", "late"]


# -- the signal ------------------------------------------------------------------------------------------------------


def test_the_first_sigterm_asks_and_the_second_would_end_the_process() -> None:
    request = StopRequest()
    with sigterm_asks(request, insist=True):
        assert handler() not in (signal.SIG_DFL, None)
        terminate()
        assert request.asked
        assert handler() is signal.SIG_DFL
    assert handler() is signal.SIG_DFL


def test_afterwards_the_default_action_is_back() -> None:
    request = StopRequest()
    with pytest.raises(ZeroDivisionError), sigterm_asks(request, insist=True):
        raise ZeroDivisionError
    assert handler() is signal.SIG_DFL
    assert not request.asked


async def test_a_signal_ends_a_wait_in_the_loop() -> None:
    request = StopRequest()
    with sigterm_asks(request, insist=True):
        task = await waiting(request)
        terminate()
        assert await task == "terminated"


def test_all_jobs_of_a_process_are_asked_by_one_handler() -> None:
    requests = [StopRequest(), StopRequest(), StopRequest()]
    with sigterm_asks(requests[0], insist=True):
        with sigterm_asks(requests[2], insist=True):
            pass
        with sigterm_asks(requests[1], insist=True), sigterm_asks(requests[1], insist=False):
            terminate()
        assert [each.asked for each in requests] == [True, True, False]


def test_a_program_that_handles_sigterm_keeps_it() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    request = StopRequest()
    with sigterm_asks(request, insist=False):
        terminate()
    assert (heard, request.asked) == ([signal.SIGTERM], False)
    with pytest.raises(LocalError, match=r"the program handles SIGTERM itself, or ignores it; call job\.stop\(\)"):
        sigterm_asks(request, insist=True).__enter__()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with pytest.raises(LocalError, match="or ignores it"):
        sigterm_asks(request, insist=True).__enter__()


def test_a_handler_that_the_program_sets_meanwhile_stays() -> None:
    with sigterm_asks(StopRequest(), insist=True):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert handler() is signal.SIG_IGN


def test_another_thread_than_the_main_one_cannot_insist() -> None:
    said: list[str] = []

    def elsewhere() -> None:
        with sigterm_asks(StopRequest(), insist=False):
            said.append(str(handler()))
        with pytest.raises(LocalError, match="only the main thread can handle signals"):
            sigterm_asks(StopRequest(), insist=True).__enter__()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert said == [str(signal.SIG_DFL)]


def test_who_wants_to_be_told_of_sigterm_is_told_before_it_asks_and_the_handler_goes_with_the_last() -> None:
    told: list[bool] = []
    request = StopRequest()
    with sigterm_tells(lambda: told.append(request.asked)):
        with sigterm_asks(request, insist=True):
            terminate()
            assert told == [False]
            assert request.asked
        assert handler() is signal.SIG_DFL
    with sigterm_tells(lambda: told.append(True)):
        with sigterm_asks(StopRequest(), insist=True):
            assert handler() is not signal.SIG_DFL
        assert handler() is not signal.SIG_DFL, "somebody still wants to be told"
    assert handler() is signal.SIG_DFL


def test_a_program_that_handles_sigterm_itself_keeps_it() -> None:
    own: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: own.append(number))
    with sigterm_tells(lambda: pytest.fail("told")):
        terminate()
    assert own == [signal.SIGTERM]


@pytest.mark.slow
def test_a_process_of_which_nothing_is_asked_dies_of_sigterm_when_it_has_told(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from quicoll.stop import sigterm_tells\n"
        "with sigterm_tells(lambda: Path(sys.argv[1]).write_text('told')):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "told")], check=False)
    assert ended.returncode == -signal.SIGTERM
    assert (tmp_path / "told").read_text() == "told"
