"""What one rank holds: the version of its state, the user's functions that read and write it, and whether it is whole.

    whole --a transfer writes into its memory, or load begins--> torn --load is done, and what it did is right--> whole

A torn state is neither the old nor the new one. Meanwhile this rank gives nothing and counts as behind every version;
the memory into which the transfer wrote is kept, so that the next one fetches only what is missing.

Where a transfer writes. Into the tensors that this rank's own save() gives, where they are of the same type and shape:
mostly the state's own memory, so that there is no second copy of it. Not into memory that cannot be written as it lies
there (read-only, strided, on a device), nor into tensors that share memory with others (tied weights): there another
tensor's bytes would be overwritten. In their place new memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.checks import plain
from quicoll.errors import LocalError
from quicoll.numerics.buffers import source, wrap, zeros
from quicoll.numerics.dtypes import DType
from quicoll.state.description import Description
from quicoll.state.tree import FlatState, flatten, own_paths, tensors_of
from quicoll.state.version import StateVersion

if TYPE_CHECKING:
    from quicoll.state.manifest import TensorRecord
    from quicoll.state.sharded import ShardedSet

__all__ = ["SHARDED", "Load", "RankState", "Save"]

SHARDED = "quicoll.sharded"
"""The key under which what is replicated of sharded states is in what `save` gives."""

Save = Callable[[], Mapping[Any, Any]]
"""Return the state of this rank: a mapping of names to tensors, values, and mappings and lists of these."""
Load = Callable[[Mapping[Any, Any]], None]
"""Put a state in the place of this rank's."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Memory of a transfer that broke."""

    record: TensorRecord
    memory: Any


class RankState:
    """See the module's head.

    Attributes:
        version: Of the state; while it is torn, of the one that was there before.
        torn: Whether it is half overwritten.
        learned: Whether this rank has learned a state outside of views, since it held a whole one (learning.py).
        save: Reads it; None until it is registered.
        load: Writes it.
        own: Paths of what is this rank's own in it.
        described: What it is a state of.
        sharded: The states of which this rank owns parts; None where it registered none. What is replicated of them
            (pieces.py) is part of what `save` gives, under the key `SHARDED`.
    """

    def __init__(self) -> None:
        self.version = StateVersion()
        self.torn = False
        self.learned = False
        self.save: Save | None = None
        self.load: Load | None = None
        self.own: tuple[tuple[str, ...], ...] = ()
        self.described = Description()
        self.sharded: ShardedSet | None = None
        self._kept: list[_Kept] = []

    def register(
        self,
        save: Save,
        load: Load,
        own: Sequence[str] = (),
        sharded: ShardedSet | None = None,
        architecture: Mapping[str, str] | None = None,
    ) -> None:
        """Take the functions that read and write the state, and try `save`.

        Args:
            save: As the user gave it.
            load: As the user gave it.
            own: Keys and paths of what is this rank's own.
            sharded: The states of which this rank owns parts.
            architecture: What it is a state of: texts by name.
        Raises:
            LocalError: One of them is no plain function, what save() gives is no state, or it has nothing at a path
                of `own`; or the architecture is no such mapping. Nothing is registered.
        """
        described_as = Description.of(architecture or {})
        save, load, paths = plain(save, "save"), plain(load, "load"), own_paths(own)
        if sharded is not None:
            save, load = _with_records(save, sharded), _without_records(load, sharded)
        found = flatten(save(), paths)
        here = [tuple(map(str, path)) for path in found.own]
        for path in paths:
            if path not in here:
                raise LocalError(f"own names {'.'.join(path)!r}, and the state that save() gives has no such key")
        if sharded is not None:
            sharded.attach(self.version.step)
        self.save, self.load, self.own, self.sharded = save, load, paths, sharded
        self.described = described_as

    def read(self) -> FlatState | None:
        """Return this rank's state, taken apart; None where none is registered.

        Raises:
            LocalError: What save() gives is no state.
        """
        return None if self.save is None else flatten(self.save(), self.own)

    def values(self) -> list[tuple[str, Any]]:
        """Return the tensors of this rank's state with their paths, in the order in which `read` gives them.

        Raises:
            LocalError: None is registered, or what save() gives is no state.
        """
        if self.save is None:
            raise LocalError("there is no state: call job.register_state(save, load)")
        return tensors_of(self.save(), self.own)

    def places(self, records: Sequence[TensorRecord], mine: FlatState) -> list[Any]:
        """Return the memory in which tensors that come are to end, in the records' order.

        Args:
            records: What comes.
            mine: This rank's own state. It counts as torn from here on, and the memory is kept, until `whole`.
        Raises:
            LocalError: There is no memory, or torch is not installed and the tensors are its.
        """
        usable = _usable(mine)
        kept = {kept.record.path: kept for kept in self._kept}
        places = []
        for record in records:
            before = kept.get(record.path)
            if before is not None and _like(before.record, record):
                places.append(before.memory)
            else:
                own = usable.pop((record.path, record.dtype, record.shape, record.kind), None)
                places.append(_allocated(record) if own is None else own)
        self.torn = True
        self._kept = [_Kept(record, memory) for record, memory in zip(records, places, strict=True)]
        return places

    def whole(self, version: StateVersion) -> None:
        """Take note that a state of this version is in place."""
        self.version, self.torn, self.learned, self._kept = version, False, False, []


def _with_records(save: Save, sharded: ShardedSet) -> Save:
    def saved() -> Mapping[Any, Any]:
        given: Any = save()
        if not isinstance(given, Mapping):
            raise LocalError(f"save() gives a mapping of names to tensors and values, not {type(given).__name__}")
        if SHARDED in given:
            raise LocalError(f"the key {SHARDED!r} of a state is the library's: give it another name")
        return {**given, SHARDED: sharded.records()}

    return saved


def _without_records(load: Load, sharded: ShardedSet) -> Load:
    def loaded(state: Mapping[Any, Any]) -> None:
        sharded.take(state.get(SHARDED))
        return load({key: value for key, value in state.items() if key != SHARDED})

    return loaded


def _like(one: TensorRecord, other: TensorRecord) -> bool:
    return (one.dtype, one.shape, one.kind) == (other.dtype, other.shape, other.kind)


def _allocated(record: TensorRecord) -> Any:
    """Allocate memory for an announced tensor. The giver, a member, holds as much itself: that bounds its size."""
    dtype = DType.parse(record.dtype)
    return wrap(zeros(math.prod(record.shape), dtype), dtype, record.shape, record.kind)


def _usable(mine: FlatState) -> dict[tuple[str, str, tuple[int, ...], str], Any]:
    """The tensors of a state that may be written where they lie, by path, type, shape and kind."""
    spans = []  # first byte, byte after the last, number of the tensor; None: of this rank's own
    for number, part in enumerate(mine.tensors):
        spans += [(start, stop, number) for start, stop in [_span(part.value)] if start < stop]
    for value in mine.own.values():
        spans += [(start, stop, -1) for start, stop in map(_span, _tensors_in(value)) if start < stop]
    shared: dict[int, None] = {}
    end, last = 0, -1
    for start, stop, number in sorted(spans):
        if start < end:
            shared |= {number: None, last: None}
        if stop > end:
            end, last = stop, number
    found: dict[tuple[str, str, tuple[int, ...], str], Any] = {}
    for number, part in enumerate(mine.tensors):
        if number not in shared:
            place = _writable(part.value)
            if place is not None:
                found[part.path, part.dtype, part.shape, part.kind] = place
    return found


def _tensors_in(value: Any) -> list[Any]:
    try:
        return [part.value for part in flatten({"": value}).tensors]
    except LocalError:  # nothing that could be handed over: it need not be a state
        return []


def _writable(value: Any) -> Any:
    """The tensor itself where its memory can be written from first to last byte, outside of autograd; else None."""
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable and value.flags.c_contiguous and type(value) is np.ndarray else None
    return value.detach() if not source(value).copied else None


def _span(value: Any) -> tuple[int, int]:
    """The first byte of a tensor in memory and the byte after its last, whatever its strides."""
    if isinstance(value, np.ndarray):
        from numpy.lib.array_utils import byte_bounds

        return byte_bounds(value) if value.size else (0, 0)
    if value.device.type != "cpu" or not value.numel():
        return 0, 0
    extent = sum(step * (size - 1) for step, size in zip(value.stride(), value.shape, strict=True)) + 1
    return value.data_ptr(), value.data_ptr() + extent * value.element_size()
