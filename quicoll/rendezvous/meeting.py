"""Ranks that a launcher has started together find each other: rank 0 starts a coordinator and signs certificates.

For a launch with nothing but ranks: torchrun, or srun and mpirun with a directory that all nodes share. What is agreed
lives as long as this launch; a job that has a coordinator and certificates (`coordinator`, `certs`) has no meeting.

    rank 0                                                     rank k
    authority in memory, a number drawn for this meeting       a key of its own
    coordinator started (host.py)
    open = number, authority's certificate, address    ----->  reads it
                                              <-----   number/ask/k = public key, node, a number of its own
    number/answer/k/its number = certificate  ----->           reads it, checks it, joins

Keys stay where they are made: the store sees certificates and public keys. Who can only read the store gains nothing;
who can write to it while the meeting is open can ask for a certificate, or give a rank another authority, and so is
trusted. The meeting is open from rank 0's word until rank 0 is in the first view, which has all ranks.

Restarts. A store may hold the words of an earlier launch, whose processes are gone: its answers never come, and a rank
that waits looks again and again which meeting is open. Each meeting has an authority of its own, so what is left of an
earlier one, process or coordinator, cannot be taken for a part of this one. A rank that was started anew asks with
another number; it gets an answer of its own while the meeting is open.

Failure cases: rank 0 does not come, or is another incarnation's: PeerError by `join_timeout`. Two ranks with one node's
name: the second is told so. The coordinator does not start: LocalError at rank 0, and its line is on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quicoll.errors import LocalError, PeerError, QuicollError
from quicoll.launchers import launch_name, on_one_host, rank_of, under_torchrun, world_size_of
from quicoll.rendezvous.applicant import Applicant, certificate_pem, certify_node, key_pem, write_credentials
from quicoll.rendezvous.hosts import own_host
from quicoll.rendezvous.scratch import scratch_directory
from quicoll.rendezvous.stores import DirectoryStore, TorchStore
from quicoll_transport.errors import TransportError
from quicoll_transport.net.addresses import format_address, parse_address
from quicoll_transport.security.authority import Authority
from quicoll_transport.security.identity import COORDINATOR, WORKER

if TYPE_CHECKING:
    from quicoll.config import Config, JoinSettings
    from quicoll.rendezvous.stores import Store

__all__ = ["Meeting", "meet_at", "meet_ranks", "meets"]

T = TypeVar("T")

_DAYS = 30
_OPEN = "open"
_FIRST_PAUSE_S = 0.02
_LAST_PAUSE_S = 0.25
_START_S = 60.0
_END_S = 2.0
"""For the coordinator to end after rank 0; then it is left to itself (host.py), because others still need it."""


def meets(config: Config, environ: Mapping[str, str]) -> bool:
    """Return whether ranks with these settings meet: neither coordinator nor certificates are named, and a place is.

    Args:
        config: As `Config.named` gives it.
        environ: The environment.
    """
    named = ("argument", "QUICOLL_COORDINATOR", "QUICOLL_CERTS")
    if config.sources["coordinator"] in named or config.sources["certs"] in named:
        return False
    return config.rendezvous is not None or under_torchrun(environ)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a rank has from its meeting.

    Attributes:
        coordinator: Where it is reached.
        certs: Directory of this rank's certificates.
        source: Where both come from, for `Config.sources`.
        close: Ends the meeting: no rank is let in any more. Called when the first view is at work.
    """

    coordinator: str
    certs: str
    source: str
    close: Callable[[], None]

    def settings(self, given: JoinSettings) -> JoinSettings:
        """Return the settings with what the meeting has added.

        Args:
            given: As `quicoll.join` got them.
        """
        return {**given, "coordinator": self.coordinator, "certs": self.certs}

    def sourced(self, config: Config) -> Config:
        """Return the configuration with the sources of what the meeting has added.

        Args:
            config: Resolved with `settings`.
        """
        return replace(config, sources={**config.sources, "coordinator": self.source, "certs": self.source})


@asynccontextmanager
async def meet_ranks(config: Config, environ: Mapping[str, str]) -> AsyncIterator[Meeting]:
    """Meet the other ranks of this launch, where a launcher says which there are. As `meet_at` otherwise.

    Args:
        config: As `Config.named` gives it.
        environ: The environment.
    Yields:
        What this rank has from it.
    Raises:
        LocalError: A setting is missing, the store cannot be used, or the coordinator does not start.
        PeerError: Rank 0 does not come within join_timeout, or refuses this rank.
    """
    rank, world_size = _place(config, environ)
    source = f"rendezvous {config.rendezvous}" if config.rendezvous is not None else "rendezvous at torchrun's store"

    def at_host(_: Store, given_up: Callable[[], bool]) -> str:
        return own_host(config, environ, together=on_one_host(environ))

    opened = partial(_store, config, environ)
    async with meet_at(opened, config, rank=rank, world_size=world_size, at_host=at_host, source=source) as meeting:
        yield meeting


@asynccontextmanager
async def meet_at(
    opened: Callable[[], Store],
    config: Config,
    *,
    rank: int,
    world_size: int,
    at_host: Callable[[Store, Callable[[], bool]], str],
    source: str,
    end_s: float = _END_S,
) -> AsyncIterator[Meeting]:
    """Meet the other ranks at a store. At the block's end the certificates are gone.

    Args:
        opened: Gives the store, on a thread of its own.
        config: As `Config.named` gives it.
        rank: Of this process in the launch.
        world_size: How many processes come.
        at_host: Gives, at rank 0, the address at which the others reach this host, on a thread of its own; it is
            given the store, and what says that nobody waits for it any more.
        source: Where what comes of it comes from, for `Config.sources`.
        end_s: Seconds that rank 0 gives the coordinator, at the block's end, to end before it is left to itself.
    Yields:
        What this rank has from it.
    Raises:
        LocalError: The store cannot be used, or the coordinator does not start.
        PeerError: Rank 0 does not come within join_timeout, or refuses this rank.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory())
        stop = threading.Event()
        stack.callback(stop.set)

        def work() -> str:
            store = opened()
            if rank:
                return _ask(store, config, rank, directory, stop)
            host = _Host(config, store, world_size, directory, end_s)
            stack.callback(host.end)
            try:
                address = host.open(at_host(store, stop.is_set))
            except BaseException:
                host.end()
                raise
            if stop.is_set():  # nobody waits for this any more, and the block may have ended without its coordinator
                host.end()
                raise LocalError("rendezvous: it was given up")
            threading.Thread(target=host.keep, args=(stop,), name="quicoll-rendezvous", daemon=True).start()
            return address

        address = await _in_thread(work, stop)
        yield Meeting(address, str(directory), source, stop.set)


def _place(config: Config, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's place in the launch, which is not the rank of any view."""
    rank, world = rank_of(environ), world_size_of(environ)
    if rank is None or config.world_size is None:
        raise LocalError(
            "rendezvous: no launcher says which rank this is and how many there are; start it with torchrun, srun or "
            "mpirun, or set RANK and WORLD_SIZE"
        )
    try:
        place = int(rank.value)
    except ValueError:
        raise LocalError(f"rendezvous: {rank.source} = {rank.value!r} is no rank") from None
    launched = config.world_size if world is None else int(world.value) if world.value.isdigit() else config.world_size
    if not 0 <= place < max(launched, config.world_size):
        raise LocalError(f"rendezvous: {rank.source} = {place}, and there are {launched} ranks")
    return place, max(launched, config.world_size)


def _store(config: Config, environ: Mapping[str, str]) -> Store:
    if config.rendezvous is not None:
        return DirectoryStore(config.rendezvous, f"{config.job}-{launch_name(environ)}")
    return TorchStore(environ, timeout=config.join_timeout)


async def _in_thread(work: Callable[[], T], stop: threading.Event) -> T:
    """Run what blocks in a thread of its own: the program may have filled the loop's. Cancelled, it stops soon."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def returned(result: T) -> None:
        if not ended.done():
            ended.set_result(result)

    def raised(error: BaseException) -> None:
        if not ended.done():
            ended.set_exception(error)

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            try:
                result = work()
            except BaseException as error:  # it is raised where the thread was started from
                loop.call_soon_threadsafe(raised, error)
            else:
                loop.call_soon_threadsafe(returned, result)

    thread = threading.Thread(target=run, name="quicoll-rendezvous", daemon=True)
    thread.start()
    try:
        return await ended
    except asyncio.CancelledError:
        stop.set()
        raise


# -- rank 0 ----------------------------------------------------------------------------------------------------------


class _Host:
    """Rank 0's part. `open` and then `keep` run on threads, `end` on the caller's."""

    def __init__(self, config: Config, store: Store, world_size: int, directory: Path, end_s: float) -> None:
        self._config = config
        self._end_s = end_s
        self._store = store
        self._world_size = world_size
        self._directory = directory
        self._authority = Authority.create(job=config.job, days=_DAYS)
        self._number = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._nodes = {config.node: 0}
        self._answered: dict[int, str] = {}
        self._keeping = threading.Lock()

    def open(self, at: str) -> str:
        """Start the coordinator at this host's address, take part oneself, and say that the meeting is open.

        Returns:
            The coordinator's address.
        """
        authority = certificate_pem(self._authority.certificate)
        certificate, key = self._authority.sign(role=WORKER, node=self._config.node, days=_DAYS)
        write_credentials(
            self._directory, role=WORKER, node=self._config.node, authority=authority,
            certificate=certificate_pem(certificate), key=key_pem(key),
        )  # fmt: skip
        address = self._start(at)
        said = {"number": self._number, "authority": authority, "coordinator": address}
        self._store.set(_OPEN, json.dumps(said).encode())
        return address

    def _start(self, host: str) -> str:
        config = self._config
        certificate, key = self._authority.sign(role=COORDINATOR, node=COORDINATOR, days=_DAYS)
        order = {
            "authority": certificate_pem(self._authority.certificate),
            "certificate": certificate_pem(certificate),
            "key": key_pem(key),
            "job": config.job,
            "listen": format_address((host, 0)),
            "world_size": config.world_size,
            "seed": config.seed,
            "lost_after": None if config.sources["lost_after"] == "default" else config.lost_after,
            "events": config.events,
        }
        try:
            # -P: the program's directory may hold a file of any name.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quicoll.rendezvous.host"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise LocalError(f"rendezvous: the coordinator cannot be started: {error.strerror}") from error
        self._process = process
        if process.stdin is None or process.stdout is None:
            raise LocalError("rendezvous: the coordinator has no pipes")
        late = threading.Timer(max(_START_S, config.join_timeout), process.kill)
        late.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
            address = process.stdout.readline().decode().strip()
        finally:
            late.cancel()
        process.stdout.close()
        if not address:
            raise LocalError(f"rendezvous: the coordinator did not start at {host}; what it says is on stderr")
        return address

    def keep(self, stop: threading.Event) -> None:
        """Answer who asks, until the meeting is closed. What goes wrong here is met by those who wait for an answer."""
        pause = _FIRST_PAUSE_S
        with self._keeping:
            while not stop.wait(pause):
                pause = min(pause * 1.5, _LAST_PAUSE_S)
                with contextlib.suppress(QuicollError, TransportError):
                    for rank in range(1, self._world_size):
                        if stop.is_set():
                            break
                        if self._answer(rank):
                            pause = _FIRST_PAUSE_S
            self._store.clear()

    def _answer(self, rank: int) -> bool:
        asked = _read(self._store.get(f"{self._number}/ask/{rank}"))
        if asked is None or self._answered.get(rank) == asked.get("number"):
            return False
        node, number = str(asked.get("node")), str(asked.get("number"))
        if self._nodes.setdefault(node, rank) != rank:
            answer = {"refused": f"rank {self._nodes[node]} is called {node!r} too; each rank needs a name of its own"}
        else:
            try:
                certificate = certify_node(self._authority, public_key=str(asked.get("key")), node=node, days=_DAYS)
            except LocalError as error:
                answer = {"refused": str(error)}
            else:
                answer = {"certificate": certificate}
        self._store.set(f"{self._number}/answer/{rank}/{number[:64]}", json.dumps(answer).encode())
        self._answered[rank] = number
        return True

    def end(self) -> None:
        """Let the coordinator go: it ends when nobody needs it."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(self._end_s)
        except subprocess.TimeoutExpired:
            _leave(process)


def _leave(process: subprocess.Popen[bytes]) -> None:
    """Leave a process to itself: nobody waits for its end but a thread, which takes it from the system's table then.

    This process may end first. It would warn of a Popen that it has to give up; that of the thread it never does.
    """
    threading.Thread(target=process.wait, name="left-coordinator", daemon=True).start()


# -- the other ranks -------------------------------------------------------------------------------------------------


def _ask(store: Store, config: Config, rank: int, directory: Path, stop: threading.Event) -> str:
    """Get a certificate at the meeting that is open; return the coordinator's address."""
    applicant = Applicant(job=config.job, node=config.node)
    number = secrets.token_hex(16)
    asked = json.dumps({"key": applicant.public_key, "node": config.node, "number": number}).encode()
    deadline = time.monotonic() + config.join_timeout
    pause = _FIRST_PAUSE_S
    meeting = ""
    while not stop.wait(pause):
        said = _read(store.get(_OPEN))
        if said is not None and str(said.get("number")) != meeting:
            meeting = str(said["number"])
            store.set(f"{meeting}/ask/{rank}", asked)
            pause = _FIRST_PAUSE_S
        answer = _read(store.get(f"{meeting}/answer/{rank}/{number}")) if meeting else None
        if said is not None and answer is not None:
            return _accept(said, answer, applicant, directory)
        if time.monotonic() > deadline:
            found = (
                "rank 0 does not answer; its meeting may be an earlier launch's" if meeting else "rank 0 did not come"
            )
            raise PeerError(f"rendezvous: {found} within {config.join_timeout:g} s; is it running?", rank=0)
        pause = min(pause * 1.5, _LAST_PAUSE_S)
    raise LocalError("rendezvous: it was given up")


def _accept(said: Mapping[str, Any], answer: Mapping[str, Any], applicant: Applicant, directory: Path) -> str:
    if "refused" in answer:
        raise PeerError(f"rendezvous: rank 0 refuses this rank: {str(answer['refused'])[:400]}", rank=0)
    try:
        address = format_address(parse_address(str(said["coordinator"])))
        applicant.accept(directory, authority=str(said["authority"]), certificate=str(answer["certificate"]))
    except (KeyError, TransportError) as error:
        raise PeerError(f"rendezvous: what rank 0 answered cannot be used: {error}", rank=0) from error
    except LocalError as error:
        raise LocalError(f"rendezvous: {error}") from error
    return address


def _read(value: bytes | None) -> dict[str, Any] | None:
    """Return a word of the store; what is none, as of somebody else's, is as if it were not there."""
    if value is None:
        return None
    try:
        word = json.loads(value)
    except ValueError:
        return None
    return word if isinstance(word, dict) else None
