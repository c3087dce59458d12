"""What is measured: contenders, cases and rounds, as plain data that the command and its rank processes both read.

A *case* is one thing to do at one size. In each *round* every contender does it for about `round_s`, one after the
other, so that whatever slows the machine for a while slows them all; what is compared is the median over the rounds.
Every rank goes through the same plan in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

from quicoll.errors import LocalError

__all__ = ["RIVALS", "WORKS", "Case", "Programme", "size_text"]

WORKS = ("transfer", "allreduce", "sharded", "latency", "step")
"""transfer: a message between two processes. allreduce: sums by size. sharded: what sharded training is made of, by
size. latency: the smallest operations. step: steps."""

RIVALS = {
    "transfer": ("aioquic",),
    "allreduce": ("gloo",),
    "sharded": ("gloo",),
    "latency": ("gloo",),
    "step": ("gloo",),
}
"""With what a work can be compared: stock aioquic, or torch.distributed's Gloo over TCP."""

_SIZES = {
    "transfer": (64 << 10, 1 << 20, 16 << 20, 64 << 20),
    "allreduce": (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20),
    "sharded": (4 << 10, 1 << 20, 16 << 20),
    "latency": (4, 4 << 10),
    "step": (0, 1 << 20),
}
_KINDS = {"transfer": ("transfer",), "sharded": ("all_gather", "reduce_scatter", "broadcast"), "step": ("step",)}
_LARGEST = 4 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to do.

    Attributes:
        name: For people: "all_reduce 16 MiB".
        kind: transfer, all_reduce, all_gather, reduce_scatter, broadcast, barrier or step.
        size: Bytes of the tensor or message, of all ranks' parts of it together; 0 where there is none.
    """

    name: str
    kind: str
    size: int


@dataclass(frozen=True, slots=True)
class Programme:
    """A whole run.

    Attributes:
        work: Of WORKS.
        rivals: Of RIVALS[work].
        cases: What is done, in this order.
        rounds: How often.
        round_s: Seconds that a round of a contender takes at least, unless one call takes longer.
        datagram_bytes: UDP payload for `transfer`; 0 for what the path carries.
        lent: Whether quicoll's tensors are of `quicoll.empty`.
    """

    work: str
    rivals: tuple[str, ...]
    cases: tuple[Case, ...]
    rounds: int
    round_s: float = 0.25
    datagram_bytes: int = 0
    lent: bool = False

    @classmethod
    def of(
        cls,
        work: str,
        *,
        rivals: tuple[str, ...] = (),
        sizes: tuple[int, ...] = (),
        rounds: int = 5,
        datagram_bytes: int = 0,
        lent: bool = False,
    ) -> Programme:
        """Return the plan for a work.

        Args:
            work: Of WORKS.
            rivals: With what it is compared.
            sizes: Bytes; empty for those that say most.
            rounds: How often each contender does each case.
            datagram_bytes: See the class.
            lent: See the class.
        Raises:
            LocalError: A rival cannot do this work, or a size is above 4 GiB or too small for what is measured.
        """
        for rival in rivals:
            if rival not in RIVALS[work]:
                raise LocalError(f"{work} is compared with {' or '.join(RIVALS[work])}, not with {rival!r}")
        found: list[Case] = []
        for size in sizes or _SIZES[work]:
            least = 0 if work == "step" else 1
            if not least <= size <= _LARGEST:
                raise LocalError(f"{work} takes sizes from {least} B to {size_text(_LARGEST)}, not {size_text(size)}")
            found += [Case(_name(kind, size), kind, size) for kind in _KINDS.get(work, ("all_reduce",))]
        if work == "latency":
            found.insert(0, Case("barrier", "barrier", 0))
        return cls(work, rivals, tuple(found), rounds, datagram_bytes=datagram_bytes, lent=lent)


def _name(kind: str, size: int) -> str:
    if kind == "step":
        return f"step with {size_text(size)}" if size else "empty step"
    return f"{kind} {size_text(size)}"


def size_text(size: int) -> str:
    """Return a size as people write it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
