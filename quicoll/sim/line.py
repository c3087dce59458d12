"""The line between a simulated process and the one that has started it on the same host: words take a time by the seed,
and keep their order each way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from quicoll_transport.sim import HostLoop
    from quicoll_transport.sim.timeline import Timeline

__all__ = ["SimLine"]

_START_NS = (1_000_000, 300_000_000)
_WORD_NS = (2_000, 300_000)


class SimLine:
    """See the module's head.

    gone: whether the process that was started has ended, and hears nothing any more.
    """

    def __init__(self, timeline: Timeline, draw: random.Random, *, starter: HostLoop, started: HostLoop) -> None:
        """Begin with nothing on it.

        Args:
            timeline: Of the world.
            draw: By which times are drawn.
            starter: The loop of the process that has started the other one.
            started: Of that one.
        """
        self.gone = False
        self._timeline = timeline
        self._draw = draw
        self._loops = {True: started, False: starter}
        self._heard_ns = {True: 0, False: 0}  # when the last word to it comes, and the last one from it

    def start(self, call: Callable[[], None]) -> None:
        """Have the started process begin."""
        self._at(True, call, _START_NS)

    def to_started(self, call: Callable[[], None]) -> None:
        """Have something done at the end of the started process, later than all that was before."""
        self._at(True, call, _WORD_NS)

    def to_starter(self, call: Callable[[], None]) -> None:
        """The same at the other end."""
        self._at(False, call, _WORD_NS)

    def _at(self, inward: bool, call: Callable[[], None], between: tuple[int, int]) -> None:
        least, most = between
        delay = least + int((most - least) * self._draw.random() ** 4)  # most are short
        at_ns = self._heard_ns[inward] = max(self._heard_ns[inward], self._timeline.now_ns + delay)
        self._timeline.at(at_ns, self._do, inward, call)

    def _do(self, inward: bool, call: Callable[[], None]) -> None:
        loop = self._loops[inward]
        if not loop.dead and not (inward and self.gone):
            loop.call_soon(call)
