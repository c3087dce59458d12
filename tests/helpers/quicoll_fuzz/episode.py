"""One episode: two honest endpoints and their link, hostile ones around and inside, and what must hold.

The oracle. After every batch of inputs:
    - the honest link has not ended, and messages cross it both ways, exactly once, in order, with the right bytes;
    - nothing reached the loop's exception handler, and no exception of our own code was met on a peer's bytes (those
      of the QUIC library end one connection; they are counted by place);
    - what endpoints hold is within its bounds: connections, ids, timers, handshakes of strangers, credit;
    - no address was sent more than three times what it had sent (RFC 9000 section 8.1).
At the end, when all hostile ones have gone silent and their deadlines have passed, nothing is left of them: the same
connections, ids and timers as at the start, and no more memory (see GROWTH).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import traceback
import tracemalloc
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from endpoint_world import connection_of, cut_connection

from quicoll_transport.endpoint import Endpoint, Link, Transfer
from quicoll_transport.errors import TransportError
from quicoll_transport.link.frames import MAX_CONTROL, TAG_SIZE

from .hostile import TAGS, Hostile, HostileServer, Tally
from .mutate import disturb, mutate_datagram
from .virtual import MemoryIO, Net, Stuck, VirtualLoop, run_virtually, today
from .world import CONFIG, CREDIT, Errors, Finding, credentials, seeds

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.security.credentials import Credentials

__all__ = ["BATCHES", "GROWTH", "Finding", "run_episode"]

GROWTH = 256 << 10  # bytes that an episode may leave behind: caches of the interpreter, the counters of a link
BATCHES = {  # kinds of inputs, and how often each of them comes
    "strangers": 6, "path": 4, "handshakes": 2, "frames": 3, "controls": 5, "headers": 4, "redial": 1, "servers": 6,
}  # fmt: skip
_A, _B = ("10.0.0.1", 4433), ("10.0.0.2", 4433)
_KEPT = 24  # recorded datagrams of each kind
_PATIENCE = 90.0  # virtual seconds for an honest exchange


class Episode:
    def __init__(self, loop: VirtualLoop, seed: str, size: int, tally: Tally, *, trace: bool, only: str) -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        self.size = size
        self.tally = tally
        self.trace = trace
        self.only = only
        self.net = Net(loop)
        self.net.tap = self._record
        self.corpus: dict[object, deque[tuple[bytes, Address, Address]]] = {}
        self.seeds = seeds()
        self.raised: list[str] = []
        self.errors = Errors(tally)
        self.growth = 0
        self._enemies: list[Hostile] = []
        self._enemy: Hostile | None = None
        self._enemy_id = (1, 1)
        self._port = 0
        self._number = 0
        self._words: tuple[list[bytes], list[bytes]] = ([], [])
        self._transfers: list[Transfer] = []
        self._step = "start"

    # -- the world -----------------------------------------------------------------------------------------------

    def _open(self, node: str, address: Address) -> Endpoint:
        return Endpoint(
            credentials=credentials(node),
            config=CONFIG,
            io=MemoryIO(self.net, address),
            loop=self.loop,
            incarnation=1,
            authorize=lambda identity: None,
            on_link=self._take,
            wall_clock=today,
        )

    def _take(self, link: Link) -> None:
        mine = self._words[1] if link.node == "b" else None
        link.listen(lambda link, data: mine.append(data) if mine is not None else None, lambda link: None)

    async def main(self) -> None:
        self.loop.set_exception_handler(
            lambda loop, context: (
                self.raised.append("".join(traceback.format_exception(context["exception"])))
                if "exception" in context
                else self.raised.append(context["message"])
            )
        )
        log = logging.getLogger("quicoll")
        propagate, log.propagate = log.propagate, False
        log.addHandler(self.errors)
        # What a transport above says at a violation is a warning; millions of them are of no interest here.
        level = log.level
        log.setLevel(logging.ERROR)
        quic_log = logging.getLogger("quic")
        quic_disabled, quic_log.disabled = quic_log.disabled, True
        try:
            self.a, self.b = self._open("a", _A), self._open("b", _B)
            self.link = self.b.link(self.a.identity, addresses=[_A], dial=True)
            self.link.listen(lambda link, data: self._words[0].append(data), lambda link: None)
            await self.link.wait_up()
            await self._attack()
        finally:
            await self.b.aclose()
            await self.a.aclose()
            log.removeHandler(self.errors)
            log.propagate = propagate
            log.setLevel(level)
            quic_log.disabled = quic_disabled

    async def _attack(self) -> None:
        batches = {self.only: 1} if self.only else BATCHES
        await self._exchange()
        first = self.tally.inputs
        for batch in BATCHES:  # each once, so that what is made once is made
            await self._one(batch)
        await self._silence()
        if self.trace:
            tracemalloc.start()
            await self._one("redial")  # what lives at the end was made while memory was watched
            await self._one("headers")
            await self._silence()
        before = self._memory()
        while self.tally.inputs - first < self.size:
            await self._one(self.rng.choices(list(batches), list(batches.values()))[0])
        await self._silence()
        self.growth = self._memory() - before
        if self.trace:
            tracemalloc.stop()
            self._hold(self.growth <= GROWTH, f"{self.growth} bytes more than at the start")

    def _memory(self) -> int:
        if not self.trace:
            return 0
        gc.collect()
        own = sum(sys.getsizeof(data) for kept in self.corpus.values() for data, _, _ in kept)
        return tracemalloc.get_traced_memory()[0] - own

    async def _one(self, batch: str) -> None:
        self._step = batch
        await getattr(self, f"_{batch}")()
        self.net.tap = self._record
        await self._exchange()
        self._bounds()

    # -- inputs --------------------------------------------------------------------------------------------------

    def _record(self, data: bytes, source: Address, target: Address) -> list[tuple[float, bytes, Address]]:
        kind = (data[0] >> 4 if data[0] & 0x80 else 0, source == _A, len(data) > 200)
        self.corpus.setdefault(kind, deque(maxlen=_KEPT)).append((data, source, target))
        return [(0.0, data, source)]

    def _some(self) -> tuple[bytes, Address, Address]:
        """A recorded datagram, of each phase as often as of any other; or one of the seeds."""
        if self.rng.random() < 0.1:
            return self.rng.choice(self.seeds), self._nobody(), self.rng.choice((_A, _B))
        kind = self.rng.choice(list(self.corpus))
        return self.rng.choice(self.corpus[kind])

    def _nobody(self) -> Address:
        return (f"192.0.2.{self.rng.randrange(256)}", self.rng.randrange(1024, 65536))

    async def _strangers(self) -> None:
        """Spoilt and repeated datagrams of every phase, from wrong and from right addresses."""
        rng = self.rng
        for _ in range(1500):
            data, source, target = self._some()
            if target not in (_A, _B):
                target = rng.choice((_A, _B))
            if rng.random() < 0.9:
                data = mutate_datagram(data, rng, [self._some()[0], self._some()[0]])
            if rng.random() < 0.5:
                data = self._aim(data, self.a if target == _A else self.b)
            if rng.random() < 0.5:
                source = self._nobody() if rng.random() < 0.8 else rng.choice((_A, _B))
            if data:
                self.tally.datagrams += 1
                self.net.inject(data, source, target)
        await self._wait(0.05)

    def _aim(self, data: bytes, endpoint: Endpoint) -> bytes:
        """Put a living connection's id where the datagram names its destination; most old ones are for dead ones."""
        cid = self.rng.choice(list(endpoint._core.connections.by_cid))
        if len(data) < 20:
            return data
        if data[0] & 0x80:
            return data[:5] + bytes([len(cid)]) + cid + data[6 + data[5] :]
        return data[:1] + cid + data[9:]

    def _spoil(self, data: bytes) -> list[tuple[float, bytes]]:
        made = disturb(data, self.rng, self._some()[0])
        self.tally.datagrams += made != [(0.0, data)]
        return made

    def _on_path(self, data: bytes, source: Address, target: Address) -> list[tuple[float, bytes, Address]]:
        self._record(data, source, target)
        other = self._nobody() if self.rng.random() < 0.05 else source
        return [(delay, made, source if made is data else other) for delay, made in self._spoil(data)]

    async def _path(self) -> None:
        """Somebody on the path of the honest link."""
        self.net.tap = self._on_path
        for _ in range(8):
            await self._exchange()

    async def _redial(self) -> None:
        """The honest connection dies and is made again with somebody on the path."""
        if connection_of(self.link) is not None:
            cut_connection(self.link)
        self.net.tap = self._on_path
        await self._exchange()

    def _enter(self, lies: str, shown: Credentials | None) -> Hostile:
        self._port += 1
        enemy = Hostile(
            net=self.net,
            address=(f"10.6.{self._port >> 8 & 255}.{self._port & 255}", 1024 + (self._port >> 16)),
            target=_A,
            credentials=shown,
            trust=credentials("d").authority_pem,
            tally=self.tally,
            rng=self.rng,
            lies=lies,
            identity=self._enemy_id,
        )
        self._enemies.append(enemy)
        return enemy

    async def _handshakes(self) -> None:
        """Handshakes without a certificate, with one of another authority, and right ones, spoilt in every way."""
        rng = self.rng
        made: list[Hostile] = []
        for _ in range(6):
            who = rng.choice((credentials("d"), credentials("d", "theirs"), None))
            enemy = self._enter(rng.choice(("handshake", "nothing")), who)
            if enemy.lies == "nothing":
                enemy.spoil = self._spoil_path(enemy.address)
            made.append(enemy)
        await self._wait(0.4)
        for enemy in made:
            self._dismiss(enemy)

    def _spoil_path(self, address: Address) -> Callable[[bytes], list[bytes]]:
        def spoil(data: bytes) -> list[bytes]:
            self._record(data, address, _A)
            return [made for _, made in self._spoil(data)]

        return spoil

    def _dismiss(self, enemy: Hostile) -> None:
        enemy.leave()
        self._enemies.remove(enemy)

    async def _inside(self, lies: str) -> Hostile:
        """The hostile peer with a certificate, connected and past its Hello."""
        if self._enemy is not None and self._enemy.alive and self._enemy.lies == lies:
            return self._enemy
        if self._enemy is not None:
            self._dismiss(self._enemy)
        if self.rng.random() < 0.5:  # of another link than before; otherwise it resumes
            self._enemy_id = (self._enemy_id[0] + (self.rng.random() < 0.1), self._enemy_id[1] + 1)
        self._enemy = enemy = self._enter(lies, credentials("d"))
        await self._wait(0.02)
        enemy.hello()
        enemy.pump()
        await self._wait(0.003)
        return enemy

    async def _frames(self) -> None:
        """Authenticated, with spoilt frames in good packets."""
        for _ in range(60):
            enemy = await self._inside("frames")
            enemy.truth()
            enemy.pump()
            self._use()
            await self._wait(0.002)

    async def _controls(self) -> None:
        """Authenticated, with control messages that nobody honest sends."""
        for _ in range(80):
            enemy = await self._inside("controls")
            for _ in range(self.rng.choice((1, 2, 5))):
                (enemy.lie if self.rng.random() < 0.8 else enemy.truth)()
            enemy.pump()
            self._use()
            await self._wait(0.002)

    async def _headers(self) -> None:
        """Authenticated, with message streams that nobody honest sends."""
        for _ in range(80):
            enemy = await self._inside("headers")
            for _ in range(self.rng.choice((1, 2, 5))):
                (enemy.stream if self.rng.random() < 0.8 else enemy.truth)()
            enemy.pump()
            self._use()
            await self._wait(0.002)

    async def _servers(self) -> None:
        """We dial a node, and hostile is who answers: in its handshake, its datagrams or with a good certificate."""
        rng = self.rng
        if self._enemy is not None:  # the same node as one that dials us
            self._dismiss(self._enemy)
            self._enemy = None
        if (old := self.a.links.get(credentials("d").identity)) is not None:
            old.close("it is dialled instead")
        lies = rng.choice(("handshake", "nothing", "frames", "controls", "headers"))
        inside = lies in ("frames", "controls", "headers")
        # The last one is a member, but not the one that is dialled.
        who = [credentials("d"), credentials("d", "theirs"), credentials("b")]
        shown = who[0] if inside else rng.choice(who)
        self._port += 1
        server = HostileServer(
            net=self.net,
            address=(f"10.7.{self._port >> 8 & 255}.{self._port & 255}", 4433),
            target=_A,
            credentials=shown,
            trust=b"",
            tally=self.tally,
            rng=rng,
            lies=lies,
            identity=(1 + self._enemy_id[0], 1),  # a later life of the node than any before
            retry=rng.random() < 0.5,
        )
        self._enemy_id = (2 + self._enemy_id[0], 1)
        if lies == "nothing":
            server.spoil = self._spoil_path(server.address)
        self._enemies.append(server)
        for _ in range(60):
            link = self.a.link(credentials("d").identity, addresses=[server.address], dial=True)
            self._hold(shown is who[0] or not link.stats.connections, "a link to who is not the node that was dialled")
            if not server.alive or not inside:
                await self._wait(0.1 if inside else 0.5)  # until it is dialled again
            if server.alive and server.proved and not server.greeted:
                server.hello()
            for _ in range(rng.choice((1, 2, 5)) if server.greeted and server.alive else 0):
                lie = {"controls": server.lie, "headers": server.stream}.get(lies, server.truth)
                (lie if rng.random() < 0.8 else server.truth)()
            if server.alive:
                server.pump()
            self._use()
            await self._wait(0.002)
        if rng.random() < 0.5:
            link.close("enough")  # otherwise its deadline ends it
        self._dismiss(server)

    def _use(self) -> None:
        """What the honest application does with the hostile peer's link: a little of everything."""
        rng = self.rng
        link = self.a.links.get(credentials("d").identity)
        if link is None or link.ended:
            return
        kind = rng.random()
        tag = rng.choice(TAGS)
        try:
            if kind < 0.3:
                self._transfers.append(link.post(tag, memoryview(bytearray(rng.choice((0, 1, 100, 1000, 5000))))))
            elif kind < 0.5:
                self._transfers.append(link.send(tag, memoryview(rng.randbytes(rng.choice((0, 100, 5000, 50_000))))))
            elif kind < 0.6:
                link.send_app(b"w" * rng.choice((0, 10, 1000)))
            elif kind < 0.65:
                self._transfers.append(link.channel(rng.randrange(3)).send(rng.randbytes(rng.choice((0, 2000)))))
            elif kind < 0.7:
                link.discard(tag if rng.random() < 0.02 else rng.randbytes(3))
            elif self._transfers:
                self._transfers.pop(rng.randrange(len(self._transfers))).abort()
        except TransportError:
            pass  # a tag posted twice, or too much for a peer that acknowledges nothing: the caller's own
        self._transfers = [transfer for transfer in self._transfers if not transfer.future.done()]

    # -- the oracle ----------------------------------------------------------------------------------------------

    async def _wait(self, seconds: float) -> None:
        """Let virtual time pass, and the timers of raw sessions with it."""
        end = self.loop.time() + seconds
        while (left := end - self.loop.time()) > 0:
            await asyncio.sleep(min(left, 0.05))
            for enemy in list(self._enemies):
                if enemy.alive:
                    enemy.timer()

    def _hold(self, condition: bool, text: str) -> None:
        if not condition:
            raise Finding(f"after {self._step}: {text}")

    async def _exchange(self) -> None:
        """Messages, channels and small words over the honest link, both ways."""
        rng, b = self.rng, self.link
        self._hold(not b.ended, f"the honest link ended: {b.error}")
        while (a := self.a.links.get(self.b.identity)) is None:  # noqa: ASYNC110 - virtual time, and no event for it
            await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(_PATIENCE):
                await b.wait_up()
                for source, target, words in ((a, b, self._words[0]), (b, a, self._words[1])):
                    self._number += 1
                    tag, word = self._number.to_bytes(TAG_SIZE, "big"), self._number.to_bytes(8, "big")
                    data = rng.randbytes(rng.choice((0, 1, 3000, 30_000)))
                    memory, kept = bytearray(len(data)), bytes(data)
                    received = target.post(tag, memoryview(memory))
                    sent = source.send(tag, memoryview(data))
                    source.send_app(word)
                    source.channel(1).send(word)
                    await asyncio.gather(sent.future, received.future)
                    self._hold(memory == kept == data, "an honest message was altered")
                    self._hold(await target.channel(1).receive() == word, "an honest channel's message was altered")
                    while not words or words[-1] != word:  # noqa: ASYNC110 - nobody tells of it
                        await asyncio.sleep(0.01)
                    self._hold(words == sorted(set(words)), "an honest word came twice or out of order")
                    del words[:-1]
                    self.tally.honest += 3
        except (TimeoutError, TransportError) as error:
            raise Finding(f"after {self._step}: an honest exchange failed: {error!r}; {b!r} {b.refusal}") from error

    def _bounds(self) -> None:
        self._hold(not self.raised, f"the loop's exception handler heard: {self.raised[:1]}")
        self._hold(not self.errors.ours, f"our own code raised on a peer's bytes: {self.errors.ours[:1]}")
        for endpoint in (self.a, self.b):
            connections: list[Any] = list(endpoint._core.connections)
            strangers = endpoint._core.connections.strangers
            self._hold(strangers <= CONFIG.max_handshakes, f"{strangers} handshakes of strangers")
            self._hold(len(connections) <= CONFIG.max_handshakes + len(endpoint.links) + 1, "too many connections")
            ids = sum(len(c.cids) for c in connections)
            known = len(endpoint._core.connections.by_cid)
            self._hold(known == ids, f"{known} ids known, {ids} in use")
            self._hold(ids <= 16 * len(connections), f"{ids} connection ids for {len(connections)} connections")
            self._hold(len(endpoint._core.agenda) <= len(connections) + len(endpoint.links), "timers of what is gone")
            for connection in connections:
                held = len(connection.reader._buffer)
                self._hold(held <= MAX_CONTROL + 65536, f"{held} bytes of an unfinished control message")
            for link in endpoint.links.values():
                held = link.stats.credit_held
                self._hold(0 <= held <= CREDIT, f"{held} bytes held for {link!r}")
        self._hold(self.loop.scheduled < 2000, f"{self.loop.scheduled} timers on the loop")
        for address, sent in self.net.to_nobody.items():
            if address[0].startswith("192."):
                got = self.net.from_nobody.get(address, 0)
                self._hold(sent <= 3 * got, f"{sent} bytes sent to an address that had sent {got}")

    async def _silence(self) -> None:
        """All hostile ones go silent for longer than every deadline; nothing may be left of them."""
        for enemy in list(self._enemies):
            self._dismiss(enemy)
        self._enemy = None
        for transfer in self._transfers:
            transfer.abort()
        self._transfers.clear()
        self._step = "silence"
        await self._wait(60.0)
        await self._exchange()
        await self._wait(1.0)
        self._bounds()
        self.net.to_nobody.clear()
        self.net.from_nobody.clear()
        for endpoint in (self.a, self.b):
            links = [link.node for link in endpoint.links.values()]
            self._hold(len(links) == 1, f"links to {links} are left")
            left = len(endpoint._core.connections)
            self._hold(left == 1, f"{left} connections are left")
            strangers = endpoint._core.connections.strangers
            self._hold(strangers == 0, f"{strangers} strangers are left")
            self._hold(len(endpoint._core.agenda) <= 2, f"{len(endpoint._core.agenda)} timers are left")
            for link in endpoint.links.values():
                self._hold(link.stats.credit_held == 0, f"{link.stats.credit_held} bytes are held for an honest link")


def run_episode(seed: int, number: int, size: int, tally: Tally, *, trace: bool = False, only: str = "") -> int:
    """`size` inputs or more (mostly `only` of BATCHES) for a fresh world; bytes of growth if traced. Raises Finding."""
    name = f"{seed}/{number}"
    credentials("a")
    made: list[Episode] = []

    async def main(loop: VirtualLoop) -> None:
        made.append(Episode(loop, name, size, tally, trace=trace, only=only))
        await made[0].main()

    try:
        try:
            run_virtually(main, seed=name)
        except Stuck as stuck:
            raise Finding(f"after {made[0]._step}: {stuck}") from None
    except Finding as found:
        more = (" --trace-every 1" if trace else "") + (f" --only {only}" if only else "")
        again = f"PYTHONPATH=tests/helpers python -m quicoll_fuzz --seed {seed} --episode {number} --size {size}{more}"
        raise Finding(f"{found}\n    to see it again: {again}") from found
    finally:
        if tracemalloc.is_tracing() and trace:
            tracemalloc.stop()
    return made[0].growth
