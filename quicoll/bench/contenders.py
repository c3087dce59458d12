"""Who takes part in a comparison: quicoll, torch.distributed over Gloo, and stock aioquic.

All are made in every rank's process, and wait there while another one works. Each does a case's calls in its own
ordinary way and returns when this rank has what it was to get; quicoll over its public API.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.engine.start import read_access
from quicoll.errors import LocalError
from quicoll.local.tensors import empty
from quicoll_transport.endpoint import Endpoint, EndpointConfig, Link
from quicoll_transport.link.frames import TAG_SIZE
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.quic import SessionConfig
from quicoll_transport.quic.stock import StockReceiver, StockSender

if TYPE_CHECKING:
    from quicoll.bench.cases import Case, Programme
    from quicoll.job import Job
    from quicoll_transport.net.addresses import Address

__all__ = ["Contender", "contenders"]

_WINDOW = 16 << 20  # of flow control, the same for both transports


class Contender(ABC):
    """One way of doing the cases of a plan. `name` is as in the plan's rivals, or "quicoll"."""

    name: str

    @abstractmethod
    async def prepare(self, case: Case) -> None:
        """Make what a case needs: memory, above all."""

    @abstractmethod
    async def call(self, case: Case) -> None:
        """Do a case once."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything."""


async def contenders(plan: Programme, job: Job) -> list[Contender]:
    """Return all that take part, in the order in which they do.

    Args:
        plan: What is to be done.
        job: This rank's.
    Raises:
        LocalError: Something that a rival needs is not installed.
    """
    if plan.work == "transfer":
        made: list[Contender] = [await Messages.connected(job, plan.datagram_bytes)]
        if "aioquic" in plan.rivals:
            made.append(await StockAioquic.connected(job, plan.datagram_bytes))
        return made
    made = [Quicoll(job, lent=plan.lent)]
    if "gloo" in plan.rivals:
        made.append(await Gloo.joined(job))
    return made


class Quicoll(Contender):
    """The collectives and steps of a job."""

    name = "quicoll"

    def __init__(self, job: Job, *, lent: bool = False) -> None:
        """lent: whether tensors are of `quicoll.empty`."""
        self._job = job
        self._lent = lent
        self._tensor = np.zeros(0, np.float32)
        self._out = self._tensor
        self._counts: list[int] = []

    async def prepare(self, case: Case) -> None:
        whole, part = _elements(case, self._job.world_size)
        self._counts = [part] * self._job.world_size
        given = part if case.kind == "all_gather" else whole
        self._tensor = empty(given, np.float32) if self._lent else np.empty(given, np.float32)
        self._tensor[:] = 1.0
        self._out = np.empty(part if case.kind == "reduce_scatter" else whole, np.float32)

    async def call(self, case: Case) -> None:
        group = self._job.group
        match case.kind:
            case "barrier":
                await group.barrier()
            case "all_reduce":
                await group.all_reduce(self._tensor, out=self._out)
            case "all_gather":
                await group.all_gather(self._tensor, counts=self._counts, out=self._out)
            case "reduce_scatter":
                await group.reduce_scatter(self._tensor, out=self._out)
            case "broadcast":
                await group.broadcast(self._tensor, out=self._out)
            case "transfer" if group.rank == 0:
                await group.send(self._tensor, to=1)
            case "transfer":
                await group.recv(self._tensor, source=0, out=self._out)
            case "step":
                async with self._job.step():
                    if case.size:
                        await group.all_reduce(self._tensor, out=self._out)

    async def close(self) -> None:
        """The job is its caller's."""


class Gloo(Contender):
    """torch.distributed over Gloo and plain TCP: no encryption, no checksums, nothing agreed on at a step's end.

    A step is its operations and a barrier, which is the least that ranks need to know that all have come so far.
    """

    name = "gloo"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._tensor = self._out = torch.zeros(0)

    @classmethod
    async def joined(cls, job: Job, host: str = "127.0.0.1", patience_s: float = 600.0) -> Gloo:
        """Return it with all ranks of a job.

        Args:
            job: This rank's.
            host: An address of rank 0's host, where all meet.
            patience_s: Seconds after which Gloo gives an operation up.
        Raises:
            LocalError: torch is not installed.
        """
        try:
            import torch
            from torch import distributed
        except ModuleNotFoundError as error:
            raise LocalError("a comparison with Gloo needs torch: pip install 'quicoll[torch]'") from error
        torch.set_num_threads(1)
        if sys.platform == "linux":  # or it takes the interface of the host's name, which need not be this machine's
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        port = _free_port(host) if job.rank == 0 else 0
        port = await job.group.broadcast_object(port, root=0)

        def meet() -> None:
            distributed.init_process_group(
                "gloo",
                init_method=f"tcp://{host}:{port}",
                rank=job.rank,
                world_size=job.world_size,
                timeout=datetime.timedelta(seconds=patience_s),
            )

        await asyncio.to_thread(meet)
        return cls(torch)

    async def prepare(self, case: Case) -> None:
        whole, part = _elements(case, self._torch.distributed.get_world_size())
        # Not ones: it is reduced in place, and they would overflow.
        self._tensor = self._torch.empty(part if case.kind == "all_gather" else whole).fill_(0.0)
        self._out = self._torch.ones(part if case.kind == "reduce_scatter" else whole)

    async def call(self, case: Case) -> None:
        distributed = self._torch.distributed
        match case.kind:
            case "all_gather":
                distributed.all_gather_into_tensor(self._out, self._tensor)
            case "reduce_scatter":
                distributed.reduce_scatter_tensor(self._out, self._tensor)
            case "broadcast":
                distributed.broadcast(self._tensor, src=0)
            case "transfer" if distributed.get_rank() == 0:
                distributed.send(self._tensor, dst=1)
            case "transfer":
                distributed.recv(self._out, src=0)
            case _ if case.size:
                distributed.all_reduce(self._tensor)
        if not case.size or case.kind == "step":
            distributed.barrier()

    async def close(self) -> None:
        await asyncio.to_thread(self._torch.distributed.destroy_process_group)


class Messages(Contender):
    """A message from rank 0 into memory that rank 1 has posted: checked end to end, acknowledged by the link."""

    name = "quicoll"

    def __init__(self, job: Job, endpoint: Endpoint, link: Link | None, links: asyncio.Future[Link]) -> None:
        self._job = job
        self._endpoint = endpoint
        self._link = link
        self._links = links
        self._number = 0
        self._memory = memoryview(b"")

    @classmethod
    async def connected(cls, job: Job, datagram_bytes: int) -> Messages:
        """Return it with the link between ranks 0 and 1 up, with the certificates that both have for the job."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Link] = loop.create_future()
        credentials = read_access(job.config).credentials
        nodes = job.view.nodes
        endpoint = Endpoint(
            credentials=credentials,
            config=EndpointConfig(
                lost_after_ns=600_000_000_000,
                session=SessionConfig(datagram_bytes=datagram_bytes, window_bytes=_WINDOW),
            ),
            io=UdpSocket("127.0.0.1", 0, loop=loop),
            loop=loop,
            incarnation=time.time_ns(),
            authorize=lambda identity: None,
            on_link=found.set_result,
        )
        address: Address = tuple(await job.group.broadcast_object(list(endpoint.address), root=1))
        link: Link | None = None
        if job.rank == 0:
            link = endpoint.link(replace(endpoint.identity, node=nodes[1]), addresses=[address], dial=True)
            await link.wait_up()
        return cls(job, endpoint, link, found)

    async def prepare(self, case: Case) -> None:
        self._memory = memoryview(bytearray(case.size))
        if self._job.rank == 1 and self._link is None:
            self._link = await self._links

    async def call(self, case: Case) -> None:
        self._number += 1
        tag = self._number.to_bytes(TAG_SIZE, "big")
        if self._link is None:
            return
        if self._job.rank == 0:
            await self._link.send(tag, self._memory).future
        else:
            await self._link.post(tag, self._memory).future

    async def close(self) -> None:
        await self._endpoint.aclose()


class StockAioquic(Contender):
    """A stream of aioquic's own asyncio face, answered by a byte when all of it has come; nothing is checked."""

    name = "aioquic"

    def __init__(self, sender: StockSender | None, receiver: StockReceiver | None) -> None:
        self._sender = sender
        self._receiver = receiver
        self._data = b""

    @classmethod
    async def connected(cls, job: Job, datagram_bytes: int) -> StockAioquic:
        """Return it with rank 0 connected to rank 1."""
        receiver: StockReceiver | None = None
        address: list[object] = []
        if job.rank == 1:
            receiver = await StockReceiver.listening(datagram_bytes, window=_WINDOW)
            address = list(receiver.address)
        address = await job.group.broadcast_object(address, root=1)
        sender = None
        if job.rank == 0:
            sender = await StockSender.connected(tuple(address), datagram_bytes, window=_WINDOW)
        return cls(sender, receiver)

    async def prepare(self, case: Case) -> None:
        self._data = bytes(case.size)

    async def call(self, case: Case) -> None:
        if self._sender is not None:
            await self._sender.send(self._data)
        elif self._receiver is not None:
            await self._receiver.received()

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender.aclose()
        if self._receiver is not None:
            self._receiver.close()


def _elements(case: Case, world: int) -> tuple[int, int]:
    """Return how many float32 a case's tensor has, a multiple of the ranks where it is divided, and a rank's part."""
    part = max(1, case.size // 4 // world)
    return (part * world if case.kind in ("all_gather", "reduce_scatter") else max(1, case.size // 4)), part


def _free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])
