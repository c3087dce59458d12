"""Processes that are forked: real ones, with streams, variables, a session and an end of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import pytest

from quicoll.errors import LocalError
from quicoll.launch.forked import ForkedProcess, ForkedProgram, can_fork

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_fork(), reason="no pidfd_open here"),
    # Threads of other tests may be there; what is forked here takes no lock of theirs.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


async def ended(main: Callable[[], object], **environment: str) -> tuple[int, str]:
    """Exit status and output of a program."""
    program = ForkedProgram(main, prepare=lambda: None)
    await program.ready()
    readable, writable = os.pipe()
    process = program.start(environment, writable)
    os.close(writable)
    status = await process.wait()
    with os.fdopen(readable) as said:
        return status, said.read()


async def test_a_program_writes_to_its_own_output_and_has_its_own_variables_and_session() -> None:
    def main() -> None:
        print(os.environ["NAME"], len(os.environ), os.getsid(0) == os.getpid())  # noqa: T201 - the output is the test
        sys.stderr.write("to the same place\n")

    assert await ended(main, NAME="ann") == (0, "ann 1 True\nto the same place\n")
    assert "NAME" not in os.environ


async def test_a_program_may_run_a_loop_of_its_own_though_it_was_forked_inside_of_one() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        print("done")  # noqa: T201 - likewise

    assert await ended(lambda: asyncio.run(work())) == (0, "done\n")


async def test_files_of_who_forks_are_closed_in_the_fork() -> None:
    kept, other = os.pipe()

    def main() -> None:
        try:
            os.fstat(kept)
        except OSError:
            print("closed")  # noqa: T201 - likewise

    assert await ended(main) == (0, "closed\n")
    os.close(kept)
    os.close(other)


@pytest.mark.parametrize(
    ("error", "status"), [(SystemExit(7), 7), (SystemExit(), 0), (KeyboardInterrupt(), 130), (ValueError("mine"), 1)]
)
async def test_how_a_program_ends_is_its_exit_status(error: BaseException, status: int) -> None:
    def main() -> None:
        raise error

    found, said = await ended(main)
    assert found == status
    assert ("ValueError: mine" in said) is (status == 1)


async def test_a_process_that_is_killed_has_the_signal_for_a_status_for_everybody_who_waits() -> None:
    program = ForkedProgram(signal.pause, prepare=lambda: None)
    await program.ready()
    process = program.start(dict(os.environ))
    assert process.returncode is None
    waits = [asyncio.ensure_future(process.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waits[0].cancel()
    os.kill(process.pid, signal.SIGKILL)
    assert await asyncio.gather(*waits[1:]) == [-signal.SIGKILL] * 2
    assert process.returncode == -signal.SIGKILL


async def test_what_a_program_needs_is_imported_once_and_its_failure_is_told_to_all() -> None:
    calls: list[int] = []
    program = ForkedProgram(lambda: None, prepare=lambda: calls.append(1))
    await asyncio.gather(program.ready(), program.ready())
    assert calls == [1]

    def fail() -> None:
        raise LocalError("there is no torch")

    broken = ForkedProgram(lambda: None, prepare=fail)
    told = await asyncio.gather(broken.ready(), broken.ready(), return_exceptions=True)
    assert [str(each) for each in told] == ["there is no torch"] * 2


async def test_a_number_that_is_no_process_cannot_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(LocalError, match="Too many open files"):
        ForkedProcess(pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
