"""Datagrams of nobody into an endpoint's core, in runs: `PYTHONPATH=tests/helpers python -m quicoll_fuzz.datagrams`.

Two cores with a link between them on a virtual clock; what they send to each other is recorded. Somebody who has no key
sends runs of datagrams to one of them, each an input: bytes, headers of all forms with ids of living, closed and
unknown connections, recorded ones again, spoilt or spliced, Initials and Retries, what ends like a stateless reset.
Runs are of one form or mixed (long and short headers, ids, lengths), from the peer's address or from others.

What must hold: no exception, nor one that a carrier was ended for; the link is up and its connection the same one; each
answer is less than three times what came from its address since the last message, all tables are within their bounds,
strangers get no further than a handshake, and after each round a message crosses in each direction, byte for byte. At
the end strangers and closed connections are gone in time. All chance comes from (seed, episode).
"""

from __future__ import annotations

import heapq
import random
import sys
from typing import TYPE_CHECKING

from core_pair import Node, Pair, S
from link_pair import tag

from quicoll_transport.endpoint.core.closed import MOST, MOST_BYTES
from quicoll_transport.link.core import LinkState
from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.quic.seeded import entropy

from .command import main
from .mutate import mutate_bytes, mutate_datagram
from .virtual import today
from .world import CONFIG, Finding, credentials, seeds

if TYPE_CHECKING:
    from quicoll_transport.endpoint.core.peer import Peer
    from quicoll_transport.net.addresses import Address

__all__ = ["DatagramFuzz", "run_datagram_episode"]

_ROUND = 400  # inputs between two messages
_RECORDED = 200
_FACTOR = 3


class DatagramFuzz:
    """Two cores, and somebody without a key. tally: counts by name."""

    def __init__(self, rng: random.Random, tally: dict[str, int]) -> None:
        self.rng, self.tally = rng, tally
        self.pair = Pair(lambda node: credentials(node), CONFIG, date=today)
        self.seen: dict[Address, list[bytes]] = {}
        self.invented = seeds()
        self.pair.lost = self._record
        self.ours, self.theirs = self.pair.up()
        self.count = self.cuts = 0
        self._cut()  # so that there are ids of a closed connection, and all phases of a handshake are recorded
        self._log = {node.address: len(node.log) for node in (self.pair.a, self.pair.b)}
        self.given: dict[Address, int] = {}
        self.got: dict[Address, int] = {}

    def _record(self, source: Address, data: bytes) -> bool:
        known = self.seen.setdefault(source, [])
        known.append(data)
        if len(known) > _RECORDED:
            del known[self.rng.randrange(_RECORDED)]
        return False

    def _cut(self) -> None:
        """End the connection in order; another takes its place."""
        pair = self.pair
        self.cuts += 1
        pair.a.core.traffic.fail(pair.a.core.connections.of_link[self.ours], 0x7104, "cut")
        pair.a.act()
        pair.until(lambda: self.ours.link.state is self.theirs.link.state is LinkState.UP)
        pair.until(lambda: not pair.under_way)

    # -- what is sent --------------------------------------------------------------------------------------------

    def _cid(self, node: Node) -> bytes:
        rng, core = self.rng, node.core
        ids = (core.connections.by_cid, core.closed_connections._by_cid)[rng.random() < 0.3]
        return rng.choice(list(ids)) if ids and rng.random() < 0.9 else rng.randbytes(8)

    def _datagram(self, node: Node, recorded: list[bytes]) -> bytes:
        rng = self.rng
        kind = rng.randrange(12)
        self.tally["mixed"] += 1
        match kind:
            case 0:
                return rng.randbytes(rng.choice((1, 5, 9, 20, 21, 40, 100, 1200, 1452)))
            case 1 | 2:  # for a connection, with a header that says so
                first = bytes((0x40 | rng.randrange(64),))
                return first + self._cid(node) + rng.randbytes(rng.choice((0, 4, 12, 16, 20, 21, 60, 300, 1400)))
            case 3:  # likewise with a long header
                cid = self._cid(node)
                first = bytes((0xC0 | rng.randrange(64),)) + rng.choice((b"\0\0\0\1", b"\0\0\0\0", rng.randbytes(4)))
                size = rng.choice((0, 10, 100, 1200))
                return first + bytes((len(cid),)) + cid + bytes((8,)) + rng.randbytes(8 + size)
            case 4:  # the end of a datagram that tells of a reset, with a bit of it changed
                tokens = list(node.core.connections._by_token)
                if tokens:
                    token = bytearray(rng.choice(tokens))
                    token[rng.randrange(16)] ^= 1 << rng.randrange(8)
                    return bytes((0x40 | rng.randrange(64),)) + rng.randbytes(rng.randrange(4, 60)) + token
                return b"\x40" * 40
            case 5:
                return rng.choice(self.invented)
            case 6:
                return mutate_datagram(rng.choice(self.invented), rng, recorded) or b"\0"
            case 7:
                return rng.choice(recorded)
            case 8:
                return mutate_bytes(rng.choice(recorded), rng, recorded) or b"\0"
            case _:
                return mutate_datagram(rng.choice(recorded), rng, recorded) or b"\0"

    def _run(self, node: Node, source: Address, recorded: list[bytes]) -> DatagramRun:
        """Return a run: all of one size but the last, which may be shorter."""
        rng = self.rng
        first = self._datagram(node, recorded)[:1500]
        count = rng.choice((1, 1, 1, 2, 5, 20, 60))
        if count == 1:
            return DatagramRun(memoryview(bytearray(first)), len(first), source)
        size = len(first)
        alike = rng.random() < 0.4
        made = bytearray(first)
        for _ in range(count - 1):
            if alike:  # one head, so that they are taken as a run
                head = min(size, 9)
                made += first[:head] + rng.randbytes(size - head)
            else:
                made += self._datagram(node, recorded)[:size].ljust(size, b"\0")
        self.tally["runs"] += 1
        if rng.random() < 0.3:
            made = made[: len(made) - rng.randrange(size)]
        return DatagramRun(memoryview(made), size, source)

    # -- the oracle ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One run of inputs, and what is answered."""
        rng, pair = self.rng, self.pair
        node, other = (pair.a, pair.b) if rng.random() < 0.5 else (pair.b, pair.a)
        source = other.address if rng.random() < 0.4 else (f"198.51.100.{rng.randrange(20)}", rng.randrange(1, 5))
        run = self._run(node, source, self.seen[other.address])
        self.count += len(run)
        self.tally["inputs"] += len(run)
        self.given[source] = self.given.get(source, 0) + len(run.memory)
        node.core.receive([run], pair.now)
        for data, address in self._answers(node):
            self.got[address] = self.got.get(address, 0) + len(data)
            self.tally["answers"] += 1
        self._bounds(node)

    def _answers(self, node: Node) -> list[tuple[bytes, Address]]:
        """Return what goes to somebody who is not there, and take it off the network."""
        pair = self.pair
        before = len(pair.under_way)
        node.act()
        if len(pair.under_way) == before:
            return []
        nodes = (pair.a.address, pair.b.address)
        made = [(data, target) for _, _, _, target, data in pair.under_way if target not in nodes]
        if made:
            pair.under_way = [item for item in pair.under_way if item[3] in nodes]
            heapq.heapify(pair.under_way)
        return made

    def _bounds(self, node: Node) -> None:
        core = node.core
        figures = {
            "strangers": (core.connections.strangers, CONFIG.max_handshakes),
            "connections": (len(core.connections), CONFIG.max_handshakes + 2),
            "ids": (len(core.connections.by_cid), 2 * CONFIG.max_handshakes + 8),
            "closed": (len(core.closed_connections), MOST),
            "words": (core.closed_connections.nbytes, MOST_BYTES),
            "links": (len(core.peers), 1),
        }
        for name, (figure, most) in figures.items():
            self.tally["most " + name] = max(self.tally.get("most " + name, 0), figure)
            if figure > most:
                raise Finding(f"{figure} {name}, more than {most}")

    def round(self) -> None:
        """Inputs, then time goes on and a message crosses in each direction."""
        pair, rng = self.pair, self.rng
        if rng.random() < 0.1:
            self._cut()
        self.given.clear()
        self.got.clear()
        until = self.count + _ROUND
        while self.count < until:
            self.step()
        for address, sent in self.got.items():
            if sent > _FACTOR * self.given.get(address, 0):
                raise Finding(f"{sent} bytes to {address}, which sent {self.given.get(address, 0)}")
        end = pair.now + rng.choice((1, 20, 300)) * S // 1000
        self._message(self.ours, self.theirs, pair.a, pair.b)
        self._message(self.theirs, self.ours, pair.b, pair.a)
        pair.until(lambda: pair.now >= end)
        if (self.ours.link.stats.connections, self.theirs.link.stats.connections) != (self.cuts + 1, self.cuts + 1):
            raise Finding("the connection was lost")
        for node in (pair.a, pair.b):
            for line in node.log[self._log[node.address] :]:
                if "unexpected" in line or "could not be read" in line:
                    self.tally["carriers that raised"] = self.tally.get("carriers that raised", 0) + 1
            self._log[node.address] = len(node.log)
            node.events.clear()

    def _message(self, sender: Peer, receiver: Peer, source: Node, target: Node) -> None:
        text = self.rng.randbytes(self.rng.choice((10, 5000)))
        memory, done = bytearray(len(text)), list[object]()
        self.tally["messages"] += 1
        key = tag(self.tally["messages"])
        receiver.link.post(key, memoryview(memory), done.append)
        sender.link.send(key, memoryview(text), done.append)
        for node, peer in ((target, receiver), (source, sender)):
            node.core.touch(peer)
            node.act()
        self.pair.until(lambda: len(done) == 2 or sender.link.ended or receiver.link.ended)
        if len(done) != 2 or memory != text:
            raise Finding(f"a message did not cross: {sender.link.cause or receiver.link.cause}")

    def end(self) -> None:
        """What strangers had, and what is left of connections, is gone in time."""
        pair = self.pair
        end = pair.now + 10 * S
        pair.until(lambda: pair.now >= end)
        for node in (pair.a, pair.b):
            core = node.core
            left = (core.connections.strangers, len(core.connections), len(core.closed_connections))
            if left != (0, 1, 0):
                raise Finding(f"strangers, connections, closed: {left} at the end")


def run_datagram_episode(
    seed: int, episode: int, size: int, tally: dict[str, int], why: dict[str, int] | None = None
) -> None:
    """`size` inputs for one pair. Raises Finding."""
    for name in ("inputs", "runs", "mixed", "answers", "messages"):
        tally.setdefault(name, 0)
    rng = random.Random(f"datagrams {seed}/{episode}")
    credentials("a")
    try:
        with entropy(random.Random(f"chance {seed}/{episode}").randbytes, wall_clock=today):
            fuzz = DatagramFuzz(rng, tally)
            while fuzz.count < size:
                fuzz.round()
            fuzz.end()
    except Exception as error:  # any at all is a finding
        again = (
            f"PYTHONPATH=tests/helpers python -m quicoll_fuzz.datagrams --seed {seed} --episode {episode} --size {size}"
        )
        raise Finding(f"{type(error).__name__}: {error}\n    to see it again: {again}") from error


if __name__ == "__main__":
    sys.exit(main("quicoll_fuzz.datagrams", __doc__, run_datagram_episode))
