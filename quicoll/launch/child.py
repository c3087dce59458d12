"""One node's process, in a session of its own: started, heard line by line, ended with all that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.launch.forked import ForkedProgram
    from quicoll.launch.restarts import RestartBudget

__all__ = ["Child", "ChildProcess", "describe"]

_READ_REST_S = 1.0
"""Seconds to read what a process left in its pipe; more only helps if somebody outside its group holds the pipe."""
_LINE_MAX = 64 * 1024


class ChildProcess(Protocol):
    """A process as asyncio has it, as far as it is needed here; `quicoll.launch.forked` has another."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...


class Child:
    """One node of a run, which has one process at a time.

    Attributes:
        node: Its name.
        budget: Of its restarts.
        process: The present one; None while there is none.
        restarts: How often it was started again.
        done: Its work has ended as it should.
        dismissed: It was told to leave the job, and is not started again unless more workers are asked for.
        last_line: What its process wrote last.
        last_pid: Of the process that was started last; 0 before.
    """

    def __init__(
        self,
        node: str,
        budget: RestartBudget,
        *,
        say: Callable[[str, str], None],
        watch: Callable[[str], None],
    ) -> None:
        """Begin without a process.

        Args:
            node: Its name.
            budget: Of its restarts.
            say: Called with the name and each line that a process writes. Must not raise: nobody would read on.
            watch: Called with "+PGID" and "-PGID" (`quicoll.launch.reaper`).
        """
        self.node = node
        self.budget = budget
        self.process: ChildProcess | None = None
        self.restarts = 0
        self.done = False
        self.dismissed = False
        self.last_line = ""
        self.last_pid = 0
        self._say = say
        self._watch = watch
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the present process; None while there is none."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    async def run(self, program: Sequence[str] | ForkedProgram, extra: Mapping[str, str]) -> int:
        """Run one process to its end. Cancelled, it leaves the process and its reader as they are, for `bury`.

        Args:
            program: The command, or what is run in a fork of this process.
            extra: For its environment, on top of this process's.
        Returns:
            Its exit status, negative for a signal.
        Raises:
            LocalError: It cannot be started.
        """
        environment = {**os.environ, **extra}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("PYTHONUNBUFFERED", "1")
        self.last_line = ""
        # A pipe of our own: asyncio's Process.wait() waits for its pipes to close as well, and one that the process
        # has passed on to a child of its own stays open.
        if not isinstance(program, Sequence):
            await program.ready()
        readable, writable = os.pipe()
        try:
            process = await _started(program, environment, writable)
        except BaseException:
            os.close(readable)
            raise
        finally:
            os.close(writable)
        self.process = process
        self.last_pid = process.pid
        self._reading = asyncio.create_task(self._pass_on(readable))
        self._watch(f"+{process.pid}")
        status = await process.wait()
        await self.bury()
        return status

    async def bury(self) -> None:
        """After the process ended: end what it started itself, which would keep its pipe open too; read the rest."""
        if self.process is None or self._reading is None:
            return
        self.signal_all(signal.SIGKILL)
        await asyncio.wait([self._reading], timeout=_READ_REST_S)
        self._reading.cancel()
        self._watch(f"-{self.process.pid}")
        self.process = self._reading = None

    def ask(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it lives."""
        # Not Process.send_signal, which looks first whether the process has ended, and may take its status from who
        # waits.
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the process and to all that it has started, if any of them lives."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    async def _pass_on(self, readable: int) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(readable, "rb", buffering=0)
        )
        try:
            await self._read_lines(stream)
        finally:
            transport.close()

    async def _read_lines(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(_LINE_MAX):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LINE_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._line(line)
        if rest:
            self._line(rest)

    def _line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        if line.strip():
            self.last_line = line.strip()
        self._say(self.node, line)


async def _started(program: Sequence[str] | ForkedProgram, environment: Mapping[str, str], output: int) -> ChildProcess:
    if not isinstance(program, Sequence):
        return program.start(environment, output)
    try:
        return await asyncio.create_subprocess_exec(
            *program,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise LocalError(f"cannot start {program[0]}: {error.strerror or error}") from error


def describe(status: int) -> str:
    """Return an exit status in words. status: negative for a signal."""
    if status < 0:
        return _signal_name(-status) or f"signal {-status}"
    # What shells, and programs that end in order, make of a signal.
    name = _signal_name(status - 128)
    return f"exit status {status} ({name})" if name else f"exit status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
