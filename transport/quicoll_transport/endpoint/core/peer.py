"""One peer as the endpoint's core knows it: its link, the way to dial it, and what the observer has heard of it.

LinkCore owns the link's states and messages; this module adds what outlives a single connection but not the link: where
the peer is dialled and when again, how often it broke the protocol, and which certificate it showed last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quicoll_transport.endpoint.core.dial_plan import DialPlan
from quicoll_transport.events import LinkChanged, PayloadCorrupted, Resent, Stalled, SuspicionChanged
from quicoll_transport.link.core import LinkConfig, LinkCore, LinkId, LinkState
from quicoll_transport.net.addresses import is_numeric

if TYPE_CHECKING:
    from quicoll_transport.carrier import PathStats
    from quicoll_transport.endpoint.core.terms import Actions, NodeIdentity
    from quicoll_transport.net.addresses import Address

__all__ = ["FIRST_BACKOFF_NS", "Peer"]

FIRST_BACKOFF_NS = 50_000_000


class Peer:
    """See the module's head.

    on_app(data): a small message of the peer. on_state(state): the link's state or suspicion changed, or where the
    peer is. The holder of the link sets both before the peer can say anything; they must not raise.

    number: of the link, from 1 on; a later link has a greater one.
    attempts: connections dialled so far. violations: connections closed here because the peer broke the protocol.
    fingerprint: of the certificate that its last connection showed.
    looking_up: whether its names are being looked up.
    several: whether it may be reached at more than one address.
    living: whether the endpoint has it among its peers.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        *,
        number: int,
        incarnation: int,
        config: LinkConfig,
        addresses: Sequence[Address],
        dial: bool,
        actions: Actions,
        on_end: Callable[[Peer], None],
        payload_fault: Callable[[memoryview], None] | None,
    ) -> None:
        self.identity = identity
        self.number = number
        self.addresses: list[Address] = []
        self.several = False
        self.dial = dial
        self.on_app: Callable[[bytes], None] = lambda data: None
        self.on_state: Callable[[LinkState], None] = lambda state: None
        self.plan = DialPlan()
        self.next_dial_ns = actions.now_ns
        self.backoff_ns = FIRST_BACKOFF_NS
        self.attempts = 0
        self.violations = 0
        self.fingerprint = ""
        self.looking_up = False
        self.living = True
        self.reached_at(addresses)
        self._actions = actions
        self._on_end = on_end
        self._told_state = LinkState.CONNECTING
        self._told_suspect = False
        self._told_resends = self._told_corrupt = self._told_stalls = 0
        self.link = LinkCore(
            peer=str(identity),
            local=LinkId(incarnation, number),
            config=config,
            now_ns=actions.now_ns,
            on_app=self._app,
            on_state=self._state,
            payload_fault=payload_fault,
        )

    def reached_at(self, addresses: Sequence[Address]) -> None:
        """Take in where the peer is from now on; no addresses: where it was."""
        if addresses and list(addresses) != self.addresses:
            self.addresses = list(addresses)
            self.plan.found = ()
            self.several = len(addresses) > 1 or not is_numeric(str(addresses[0][0]))

    def __repr__(self) -> str:
        return f"<Link {self.identity} {self.link.state.value}{' suspect' if self.link.suspect else ''}>"

    def next_timer(self, *, connected: bool) -> int | None:
        """Return when to look at this peer again. connected: whether it has a connection, a dialled one included."""
        at = self.link.next_timer()
        if self.dial and not connected and at is not None:
            at = min(at, self.next_dial_ns)
        return at

    def handle_timer(self, now_ns: int, path: Callable[[], PathStats] | None) -> None:
        """Run the link's timers when they are due.

        Args:
            now_ns: The time.
            path: What the carrier knows of the path; a detector that adapts learns it first. None: no link is up.
        """
        at = self.link.next_timer()
        if at is None or now_ns < at:
            return
        detector = self.link.detector
        if detector.adapts and path is not None:
            known = path()
            if known.rtt_ns is not None and known.rttvar_ns is not None:
                detector.path(known.rtt_ns, known.rttvar_ns)
        self.link.handle_timer(now_ns)

    def wants_dial(self, now_ns: int, *, connected: bool) -> bool:
        """Return whether a connection is to be dialled now."""
        return self.dial and not connected and now_ns >= self.next_dial_ns and not self.link.ended

    def tell_counts(self) -> None:
        """Tell what the counters of the link gained since the last look."""
        stats, stalls = self.link.stats, self.link.detector.stalls
        now_ns, name, tell = self._actions.now_ns, str(self.identity), self._actions.tell
        if (more := stats.resends - self._told_resends) > 0:
            self._told_resends = stats.resends
            tell(Resent(now_ns, name, self.number, more, stats.resends))
        if (more := stats.corrupt - self._told_corrupt) > 0:
            self._told_corrupt = stats.corrupt
            tell(PayloadCorrupted(now_ns, name, self.number, more, stats.corrupt))
        if stalls > self._told_stalls:
            tell(Stalled(now_ns, name, self.number, stalls))
        self._told_stalls = stalls  # a link that comes up starts with a new detector

    def moved(self) -> None:
        """Take in that the peer of a link that is up has shown to be at another address."""
        self.on_state(self.link.state)

    def _app(self, data: bytes) -> None:
        self.on_app(data)

    def _state(self, state: LinkState) -> None:
        if state is LinkState.UP:
            self.backoff_ns = FIRST_BACKOFF_NS
            self.link.refusal = ""
        elif self.link.ended:
            self._on_end(self)
        if self._actions.observed:
            self._tell_state()
        self.on_state(state)

    def _tell_state(self) -> None:
        link, now_ns, name = self.link, self._actions.now_ns, str(self.identity)
        if link.suspect is not self._told_suspect and not link.ended:
            self._told_suspect = link.suspect
            silent_ns = round(link.detector.silent_for(now_ns) * 1e9)
            self._actions.tell(SuspicionChanged(now_ns, name, self.number, link.suspect, silent_ns))
        if link.state is not self._told_state:
            self._told_state = link.state
            self._actions.tell(LinkChanged(now_ns, name, self.number, link.state, link.cause))
