"""The process of an engine: the engine, what serves it, and the line to the program.

Run by quicoll.engine_process.starting with two descriptors: the line, and the program's arena. It ends when the engine
is closed; with its line, which is closed by the program or by its end, however that comes; and with the program's
process, where a child of that one still holds the line's other end. What a terminal or a launcher sends to all
processes of a group (SIGINT, SIGTERM, SIGHUP) is the program's affair, which tells its engine.

It steps back behind others (nice), as far as the program's setting `engine_share` says. What it logs the program logs,
by its own settings.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

from quicoll.config import Config
from quicoll.engine.inline import InlineRuntime
from quicoll.engine.start import start
from quicoll.engine_process.server import EngineServer
from quicoll.engine_process.words import LogTold, OpenEngine, decode_program_word, encode_word
from quicoll.lanes.line import ProcessLine
from quicoll.lanes.shown import credentials_shown
from quicoll.local.arena import PeerArena
from quicoll_transport.endpoint.loops import with_own_clock

if TYPE_CHECKING:
    from quicoll.engine_process.words import EngineWord

__all__ = ["main"]

_GOODBYE_S = 2.0  # to leave a job whose program is gone


class _Telling(logging.Handler):
    """Gives what is logged to the program."""

    def __init__(self, process: _Process) -> None:
        super().__init__()
        self._process = process

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "kind"):  # an event, which the program is told as one, and logs by itself
            return
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        self._process.log(LogTold(record.name, record.levelno, text))


class _Process:
    def __init__(self, line: socket.socket, arena: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._opening: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self.over: asyncio.Future[None] = loop.create_future()
        self._line = ProcessLine(line, loop=loop, on_message=self._hear, on_end=self._program_ended)
        self._server = EngineServer(
            loop=loop, arena=PeerArena(arena, writes=True), tell=self._line.send, on_over=self._end
        )

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def log(self, word: EngineWord) -> None:
        """Have the program log something; from any thread."""
        data = encode_word(word)
        try:
            self._loop.call_soon_threadsafe(self._line.send, data)
        except RuntimeError:  # the loop is closed
            return

    def _hear(self, data: bytes) -> None:
        if self._opening is not None:
            self._server.hear(data)
            return
        order = decode_program_word(data)
        if not isinstance(order, OpenEngine) or order.parent != os.getppid():
            self._end()
            return
        self._loop.add_reader(os.pidfd_open(order.parent), self._program_ended)
        self._opening = self._loop.create_task(self._open(order))

    async def _open(self, order: OpenEngine) -> None:
        os.nice(order.nice)
        told = logging.getLogger("quicoll")
        told.setLevel(order.log_level)
        told.addHandler(_Telling(self))
        told.propagate = False
        try:
            config = Config(**json.loads(order.settings))
            engine, _ = await start(
                config,
                observer=self._server.observe,
                runtime=InlineRuntime(),
                stacks=self._server.stacks,
                credentials=credentials_shown(order.shown),
                incarnation=order.incarnation,
            )
        except Exception as error:  # whatever it is, the program waits for it
            self._server.not_opened(error)
            return
        self._server.use(engine)

    def _program_ended(self) -> None:
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._leave())

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(_GOODBYE_S):
                if self._opening is not None:
                    await self._opening
                await self._server.program_ended()
        except TimeoutError:
            pass
        finally:
            self._end()


async def _run(line: int, arena: int) -> None:
    process = _Process(socket.socket(fileno=line), arena, with_own_clock(asyncio.get_running_loop()))
    os.close(arena)
    await process.over


def main(line: int, arena: int) -> None:
    """Be an engine, until it is closed or the line ends.

    Args:
        line: Descriptor of its end of the line.
        arena: Descriptor of the program's memory for tensors.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    asyncio.run(_run(line, arena))
