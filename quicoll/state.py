"""Bring all ranks of a view to one state, before any step begins in it.

A rank's state has a version: the coordinator's number of the latest decision that it includes, and the number of the
last step. The step's number counts what the state has been through. It travels with the state (a checkpoint, or a
member's memory), while the coordinator numbers its decisions by itself; so a job that starts again from a checkpoint
goes on from the checkpoint's number.

When a view begins, the ranks compare their versions. The newest is that of the latest decision, then of the highest
step. The lowest rank that holds it and has registered `save` gives it to all that are behind:

    all_gather   version of each rank, and whether it has registered save and load
    broadcast    size of the manifest, then the manifest: name, type, shape and digest of each tensor, sorted by name
    broadcast    each tensor, in the manifest's order; each receiver checks its digest

Invariants: every rank computes the giver from the same numbers, so no rank waits for one that does not take part; a
state whose digest differs is never loaded; `load` is called once, with the whole state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from quicoll.checks import done, plain
from quicoll.errors import Corrupted, LocalError, PeerError
from quicoll.numerics.buffers import empty, memory, source, tensor_digest, wrap
from quicoll.numerics.dtypes import DType

if TYPE_CHECKING:
    from quicoll.collectives.group import Group

__all__ = ["Handover", "Load", "RankState", "Save", "StateVersion", "compare", "synchronise"]

Save = Callable[[], Mapping[str, Any]]
"""Return the state of this rank: names and tensors."""
Load = Callable[[Mapping[str, Any]], None]
"""Put a state in the place of this rank's."""

_MAX_TENSORS = 1 << 20
_MAX_MANIFEST = 1 << 30  # bytes


@dataclass(frozen=True, slots=True, order=True)
class StateVersion:
    """How new a state is; the larger is the newer.

    decision: The coordinator's number of the latest decision in it; 0 where none was taken since this process began.
    step: The number of the last step in it; 0 at the start.
    """

    decision: int = 0
    step: int = 0


class RankState:
    """What one rank holds: the version of its state, and the user's functions that read and write it."""

    def __init__(self) -> None:
        self.version = StateVersion()
        self.save: Save | None = None
        self.load: Load | None = None

    def register(self, save: Save, load: Load) -> None:
        """Take the functions that read and write the state.

        Raises:
            LocalError: One of them is no plain function.
        """
        self.save = plain(save, "save")
        self.load = plain(load, "load")


@dataclass(frozen=True, slots=True)
class StateComparison:
    """Who has the newest state. giver: the rank that hands it to `behind`; None where it cannot be handed over."""

    newest: StateVersion
    current: tuple[int, ...]
    behind: tuple[int, ...]
    giver: int | None


@dataclass(frozen=True, slots=True)
class Handover:
    """This rank received a state of `version` from rank `giver`."""

    giver: int
    version: StateVersion


def compare(held: Sequence[tuple[StateVersion, bool]]) -> StateComparison:
    """Find who gives the newest state to whom. Every rank calls this with the same values.

    Args:
        held: By rank: the version of its state, and whether it has registered `save` and `load`.
    """
    newest = max(version for version, _ in held)
    current = tuple(rank for rank, (version, _) in enumerate(held) if version == newest)
    behind = tuple(rank for rank, (version, _) in enumerate(held) if version != newest)
    givers = [rank for rank in current if held[rank][1]]
    able = bool(givers) and all(held[rank][1] for rank in behind)
    return StateComparison(newest, current, behind, givers[0] if able else None)


async def synchronise(state: RankState, group: Group, *, view_id: int) -> Handover | None:
    """Bring every rank of a view to the newest state that any of them holds.

    Args:
        state: What this rank holds. Its version is brought up to date.
        group: All ranks of the view, with operations numbered apart from the user's.
        view_id: The view's number, for errors.
    Returns:
        From whom this rank received a state, or None if it kept its own.
    Raises:
        LocalError: This rank is behind and nothing can be handed to it, or what `save` returned is no state.
        PeerError: A rank was lost, or the giver sent a malformed manifest.
        Corrupted: A tensor arrived with other bits than the giver announced.
    """
    version = state.version
    mine = np.array([version.decision, version.step, state.save is not None], np.int64)
    rows = (await group.all_gather(mine)).reshape(-1, 3)
    found = compare([(StateVersion(int(decision), int(step)), bool(able)) for decision, step, able in rows])
    if not found.behind:
        return None
    if found.giver is None:
        if found.newest.step and group.rank in found.behind:
            raise LocalError(
                f"this rank's state is after step {version.step}, the job's after step {found.newest.step}: "
                "call job.register_state(save, load) so that it can be handed over"
            )
        # Nothing was ever trained, or this rank is current: the decisions before this one concern no state of its own.
        state.version = StateVersion(found.newest.decision, version.step)
        return None
    received = await _transfer(state, group, found.giver, view_id)
    if group.rank not in found.behind:
        return None
    if state.load is None:
        raise LocalError("no state registered")
    done(state.load(received), "load")
    state.version = found.newest
    return Handover(found.giver, found.newest)


async def _transfer(state: RankState, group: Group, giver: int, view_id: int) -> dict[str, Any]:
    """Send the giver's state to all ranks; the tensors by name, each checked by its digest."""
    giving = group.rank == giver
    given = _checked(state.save()) if giving and state.save is not None else {}
    manifest = encode_manifest(given) if giving else b""
    size = int((await group.broadcast(np.array([len(manifest)], np.int64), root=giver))[0])
    if not 0 <= size <= _MAX_MANIFEST:
        raise PeerError(f"a state manifest of {size} bytes", rank=giver, view=view_id)
    packed = np.frombuffer(manifest, np.uint8) if giving else np.empty(size, np.uint8)
    packed = await group.broadcast(packed, root=giver)
    received: dict[str, Any] = {}
    for tensor in decode_manifest(memory(packed), giver=giver, view_id=view_id):
        value = await group.broadcast(given[tensor.name] if giving else _empty(tensor), root=giver)
        if tensor_digest(value) != tensor.digest:
            raise Corrupted(f"the state's {tensor.name!r} fails its digest", rank=giver, view=view_id)
        received[tensor.name] = value
    return received


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in the manifest of a state. digest: 16 bytes over type, shape and elements."""

    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    torch: bool
    digest: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[TensorRecord, ...])


def encode_manifest(state: Mapping[str, Any]) -> bytes:
    """Describe each tensor of a state, sorted by name.

    Raises:
        LocalError: A value is neither an array nor a tensor.
    """
    return _encoder.encode(tuple(_describe(name, state[name]) for name in sorted(state)))


def decode_manifest(data: bytes | memoryview, *, giver: int, view_id: int) -> tuple[TensorRecord, ...]:
    """Read a manifest that rank `giver` sent.

    Raises:
        PeerError: It is malformed, or names more tensors than a state may have.
    """
    try:
        tensors = _decoder.decode(data)
        for tensor in tensors:
            DType.parse(tensor.dtype)
    except (msgspec.MsgspecError, LocalError) as error:
        raise PeerError(f"malformed state manifest: {error}", rank=giver, view=view_id) from error
    if len(tensors) > _MAX_TENSORS:
        raise PeerError(f"a state of {len(tensors)} tensors", rank=giver, view=view_id)
    return tensors


def _checked(state: object) -> dict[str, Any]:
    """Return what save() returned, if it is a state."""
    if not isinstance(state, Mapping):
        raise LocalError(f"save() gives a mapping of names to tensors, not {type(state).__name__}")
    if len(state) > _MAX_TENSORS:
        raise LocalError(f"a state has at most {_MAX_TENSORS} tensors, not {len(state)}")
    for name in state:
        try:
            name.encode()
        except (AttributeError, UnicodeEncodeError):
            raise LocalError(f"a name in the state that save() gave is no text: {name!r}") from None
    return dict(state)


def _describe(name: str, value: Any) -> TensorRecord:
    read = source(value)
    return TensorRecord(name, read.dtype.name, read.shape, read.kind == "torch", tensor_digest(read))


def _empty(tensor: TensorRecord) -> Any:
    """Allocate memory for an announced tensor. The giver, a member, holds as much itself: that bounds its size."""
    dtype = DType.parse(tensor.dtype)
    flat = empty(math.prod(tensor.shape), dtype)
    return wrap(flat, dtype, tensor.shape, "torch" if tensor.torch else "numpy")
