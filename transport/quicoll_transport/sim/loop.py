"""The event loop of one simulated process: asyncio on its host's clock.

Everything that asyncio itself needs is here (callbacks, timers, tasks, futures); so tasks, timeouts, locks, queues and
task groups behave as ever. Order is total and depends on nothing outside: callbacks run first in, first out, also
across hosts; timers by due time, equal ones in the order in which they were set.

What would touch the real world raises Forbidden and says what to use instead: sockets, servers, subprocesses, signals.
Threads: a function given to an executor (`asyncio.to_thread`) runs here, at once and alone, and its result arrives
`EXECUTOR_NS` later, as from a thread that took that long. A `SimulatedExecutor` says itself when it runs, and when the
result arrives.

After `die` nothing that was scheduled runs, and nothing can be scheduled.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import traceback
import warnings
from asyncio import _get_running_loop, _set_running_loop  # asyncio offers them to event loops, under these names
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from quicoll_transport.net.addresses import is_numeric, is_v6
from quicoll_transport.sim.errors import Forbidden
from quicoll_transport.sim.executor import SimulatedExecutor
from quicoll_transport.sim.timeline import Process

if TYPE_CHECKING:
    from quicoll_transport.sim.network import Interface
    from quicoll_transport.sim.timeline import LoopOwner, PendingCall, Timeline, TimerCall

__all__ = ["EXECUTOR_NS", "HostLoop"]

T = TypeVar("T")

EXECUTOR_NS = 100_000  # what a function in an executor takes; no time at all would hide what happens meanwhile

_LAST_WORDS = 100  # awaits of one dead coroutine; what is still suspended then is left to the garbage collector


_NETWORK = "the simulated network carries datagrams only; open a SimulatedSocket"
_PROCESS = "a simulated process starts no other and gets no signals; see Host.kill and Host.pause"


def _refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **settings: Any) -> NoReturn:
        raise Forbidden(f"loop.{name} on a simulated host: {instead}")

    return refuse


def _is_closed(coroutine: Any) -> bool:
    """Close a coroutine; return whether it is. The last words of a killed process are heard by nobody."""
    try:
        coroutine.close()
    except BaseException:
        return False
    return True


def _close(coroutine: Any) -> None:
    for _ in range(_LAST_WORDS):  # a `finally` that awaits is suspended again
        if _is_closed(coroutine):
            break


class HostLoop(asyncio.AbstractEventLoop):
    """The event loop of one process; `Host.start` makes it and `World.run` runs it.

    Attributes:
        host: The host that the process runs on.
        interface: Where its sockets are attached to the network.
    """

    def __init__(self, timeline: Timeline, host: LoopOwner, interface: Interface) -> None:
        self.host = host
        self.interface = interface
        self._timeline = timeline
        self._process = Process(timeline, host, self)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._task_factory: Any = None
        self._exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    def __repr__(self) -> str:
        return f"<HostLoop {self.host.name}#{self.host.lives}{' dead' if self.dead else ''}>"

    @property
    def dead(self) -> bool:
        """Whether the process has ended."""
        return self._process.dead

    # -- time and callbacks --------------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds of the host's monotonic clock."""
        return self._process.time()

    def call_soon(  # type: ignore[override]  # which ties the arguments to the callback, and returns a Handle
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> PendingCall:
        return self._process.call_soon(callback, args, context)

    def call_soon_threadsafe(  # type: ignore[override]  # the same
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> PendingCall:
        self._timeline.check_thread()
        return self._process.call_soon(callback, args, context)

    def call_later(  # type: ignore[override]  # the same
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> TimerCall:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # the same
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> TimerCall:
        if math.isnan(when):
            raise ValueError("a time that is not a number")
        return self._process.call_at(when, callback, args, context)

    # -- futures and tasks ---------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **settings: Any) -> asyncio.Task[T]:
        if self._task_factory is not None:
            task: asyncio.Task[T] = self._task_factory(self, coro, **settings)
        else:
            work: Any = coro  # typeshed allows a generator up to Python 3.11 alone
            task = asyncio.Task(work, loop=self, **settings)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks that are not done, in the order in which they were made."""
        return list(self._tasks)

    @property
    def timers(self) -> list[TimerCall]:
        """Timers that are pending, by due time; none of a dead process."""
        return [] if self.dead else self._timeline.timers_of(self._process)

    def set_task_factory(self, factory: Any) -> None:
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        return self._task_factory

    def die(self) -> None:
        """The process is gone. Its tasks are buried with it; see `host`."""
        self._process.dead = True
        for task in self._tasks:
            # A killed process says nothing of its pending tasks, and there is no public way to silence them.
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
        self._timeline.bury(self)

    def close_tasks(self) -> None:
        """Close what was suspended when the process ended, in order. Whatever it does reaches nobody."""
        self._bury(self._close_each)

    def _bury(self, close: Callable[[], object]) -> None:
        outer = _get_running_loop()  # of a notebook, where a world is closed after its run
        _set_running_loop(self)
        try:
            with warnings.catch_warnings():
                # Coroutines that they make and cannot await any more.
                warnings.simplefilter("ignore", RuntimeWarning)
                close()
        finally:
            _set_running_loop(outer)

    def _close_each(self) -> None:
        while self._tasks:  # what closes one may make another
            task = next(iter(self._tasks))
            del self._tasks[task]
            _close(task.get_coro())

    # -- state ---------------------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        return self._timeline.current is self

    def is_closed(self) -> bool:
        return self.dead

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """asyncio's debug mode looks at the real clock; there is none."""

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        self._exception_handler = handler

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        return self._exception_handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = context.get("message") or "unhandled error"
        if error is not None:
            text += "\n" + "".join(traceback.format_exception(error)).rstrip()
        self._timeline.failed(self.host.name, text)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.dead:
            return
        if self._exception_handler is not None:
            self._exception_handler(self, context)
        else:
            self.default_exception_handler(context)

    def generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        """An asynchronous generator was left half way: its loop closes it.

        Unless its process is gone: then what it awaits is closed as the tasks are, since the end of a task that awaits
        a generator does not reach into it, and the interpreter would complain of what that says.
        """
        awaited = getattr(generator, "ag_await", None)  # which a generator written in C need not have
        if not self.dead:
            self.call_soon(self.create_task, generator.aclose())
        elif awaited is not None:
            self._bury(partial(_close, awaited))

    async def shutdown_asyncgens(self) -> None:
        """Asynchronous generators end with their process."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is no executor."""

    # -- what stands for threads and the resolver ----------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]  # which ties the arguments to the callback
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        if isinstance(executor, SimulatedExecutor):
            return executor.begin(self, partial(func, *args))
        future: asyncio.Future[T] = self.create_future()

        def give(result: T | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # None is the function's own answer then

        # By the world's clock: a host that is paused or slow hears of it when it runs again, as from a real thread.
        def run() -> None:
            if self.dead or future.cancelled():
                return
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = func(*args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                failure = error
            self.call_later(EXECUTOR_NS / 1e9, give, result, failure)

        self.call_soon(run)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        """Numeric addresses, and the names of the world's hosts."""
        import socket

        name = str(host)
        ip = name if is_numeric(name) else self.interface.network.resolve(name)
        if ip is None:
            raise socket.gaierror(socket.EAI_NONAME, f"the simulated world has no host {name!r}")
        family = socket.AF_INET6 if is_v6((ip, 0)) else socket.AF_INET
        return [(family, socket.SOCK_DGRAM, socket.IPPROTO_UDP, "", (ip, int(port or 0)))]

    # -- what is not for simulated code --------------------------------------------------------------------------

    def run_forever(self) -> NoReturn:
        raise Forbidden("the simulation runs this loop; do not run it again")

    def run_until_complete(self, future: Any) -> NoReturn:
        if asyncio.iscoroutine(future):
            future.close()
        raise Forbidden("the simulation runs this loop; await instead of run_until_complete")

    def stop(self) -> NoReturn:
        raise Forbidden("the simulation runs this loop; return from the process's coroutine instead")

    def close(self) -> NoReturn:
        raise Forbidden("the simulation runs this loop and closes it")

    add_reader: Any = _refusal("add_reader", _NETWORK)
    add_writer: Any = _refusal("add_writer", _NETWORK)
    remove_reader: Any = _refusal("remove_reader", _NETWORK)
    remove_writer: Any = _refusal("remove_writer", _NETWORK)
    connect_accepted_socket: Any = _refusal("connect_accepted_socket", _NETWORK)
    create_connection: Any = _refusal("create_connection", _NETWORK)
    create_datagram_endpoint: Any = _refusal("create_datagram_endpoint", _NETWORK)
    create_server: Any = _refusal("create_server", _NETWORK)
    create_unix_connection: Any = _refusal("create_unix_connection", _NETWORK)
    create_unix_server: Any = _refusal("create_unix_server", _NETWORK)
    getnameinfo: Any = _refusal("getnameinfo", _NETWORK)
    sendfile: Any = _refusal("sendfile", _NETWORK)
    start_tls: Any = _refusal("start_tls", _NETWORK)
    sock_accept: Any = _refusal("sock_accept", _NETWORK)
    sock_connect: Any = _refusal("sock_connect", _NETWORK)
    sock_recv: Any = _refusal("sock_recv", _NETWORK)
    sock_recv_into: Any = _refusal("sock_recv_into", _NETWORK)
    sock_recvfrom: Any = _refusal("sock_recvfrom", _NETWORK)
    sock_recvfrom_into: Any = _refusal("sock_recvfrom_into", _NETWORK)
    sock_sendall: Any = _refusal("sock_sendall", _NETWORK)
    sock_sendfile: Any = _refusal("sock_sendfile", _NETWORK)
    sock_sendto: Any = _refusal("sock_sendto", _NETWORK)
    add_signal_handler: Any = _refusal("add_signal_handler", _PROCESS)
    remove_signal_handler: Any = _refusal("remove_signal_handler", _PROCESS)
    connect_read_pipe: Any = _refusal("connect_read_pipe", _PROCESS)
    connect_write_pipe: Any = _refusal("connect_write_pipe", _PROCESS)
    subprocess_exec: Any = _refusal("subprocess_exec", _PROCESS)
    subprocess_shell: Any = _refusal("subprocess_shell", _PROCESS)
    set_default_executor: Any = _refusal(
        "set_default_executor", "asyncio.to_thread runs the function at once and alone"
    )
