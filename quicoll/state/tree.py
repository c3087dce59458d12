"""Take a nested state apart into its tensors and all the rest, and put it together again. No pickle.

A state is a mapping. In it, to any depth up to MAX_DEPTH: mappings with keys that are str or int, lists, tuples, None,
bool, int, float, complex, str, bytes, numpy scalars, numpy arrays and torch tensors.

    lines       one for each node, in order: a mapping's keys sorted (int before str), a list's items as they are. Two
                states are equal if, and only if, their lines are: a line holds its depth, its key, its type, and a
                small value or a tensor's digest. Whether a tensor is numpy's or torch's does not count
    tensors     in the order of the lines, by path: "optimizer.state.0.exp_avg"
    skeleton    msgpack of the structure, with all values but the tensors in it, and a number in each tensor's place

`rebuild` gives mappings as dict, in the order of the lines, and everything else as the type that it was. So subclasses
that would lose what they are (a namedtuple, an IntEnum) are refused, by path and type, as is everything unknown.

What is a rank's own (`own`: keys of mappings, "sampler" or by a path "data.sampler") is left out of all three, and may
be of any type; `rebuild` puts in its place what the receiving rank has there itself.

Bounds: MAX_NODES lines and MAX_SKELETON bytes at both ends, MAX_DEPTH levels, MAX_INT_BITS for an int.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from quicoll.errors import LocalError
from quicoll.numerics.buffers import source, tensor_digest, wrap
from quicoll.numerics.dtypes import DType

if TYPE_CHECKING:
    from quicoll.numerics.buffers import ArrayKind

__all__ = [
    "MAX_DEPTH",
    "MAX_NODES",
    "MAX_SKELETON",
    "FlatState",
    "FlatTensor",
    "Line",
    "described_digest",
    "flatten",
    "own_paths",
    "rebuild",
    "tensors_of",
]

MAX_DEPTH = 64
MAX_NODES = 1 << 20
MAX_SKELETON = 64 << 20
MAX_INT_BITS = 8192

_WORD = 1 << 63  # of msgpack's integers
_SHOWN = 40  # characters of a number
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Any)


@dataclass(frozen=True, slots=True)
class Line:
    """One node of a state, for comparing and for naming.

    path: where it is, "" for the whole. what: its type and size, for people. shape: what has to be equal for two states
    to be of one kind (depth, key, type, shape). content: its value, or its tensor's digest.
    """

    path: str
    what: str
    shape: bytes
    content: bytes


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """One tensor of a state. value: as `save` gave it. digest: over type, shape and elements."""

    path: str
    value: Any
    dtype: str
    shape: tuple[int, ...]
    kind: ArrayKind
    digest: bytes


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state, taken apart. own: the values that are the rank's own, by path. nbytes: of all tensors."""

    skeleton: bytes
    tensors: tuple[FlatTensor, ...]
    lines: tuple[Line, ...]
    own: dict[tuple[str | int, ...], Any]
    digest: bytes = field(init=False)
    kind_digest: bytes = field(init=False)

    @property
    def nbytes(self) -> int:
        return sum(math.prod(part.shape) * DType.parse(part.dtype).itemsize for part in self.tensors)

    def __post_init__(self) -> None:
        """digest: 16 bytes, equal where all bits are. kind_digest: equal where names, types and shapes are."""
        whole, kind = xxhash.xxh3_128(), xxhash.xxh3_128()
        for line in self.lines:
            kind.update(len(line.shape).to_bytes(4, "big") + line.shape)
            whole.update(len(line.shape).to_bytes(4, "big") + line.shape)
            whole.update(len(line.content).to_bytes(4, "big") + line.content)
        object.__setattr__(self, "digest", whole.digest())
        object.__setattr__(self, "kind_digest", kind.digest())


def own_paths(own: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the declared paths, split at their dots.

    Raises:
        LocalError: It is no sequence of names, or one is empty.
    """
    given: Any = own
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise LocalError(f'own names what is each rank\'s own: own=("sampler",), not {own!r}')
    for name in given:
        if not isinstance(name, str) or not all(name.split(".")):
            raise LocalError(f"own names keys of the state, or paths such as 'data.sampler', not {name!r}")
    return tuple(tuple(name.split(".")) for name in given)


def flatten(state: object, own: Sequence[tuple[str, ...]] = ()) -> FlatState:
    """Take a state apart. Reads each tensor once, for its digest; copies none that is contiguous and on the host.

    Args:
        state: A mapping.
        own: The paths that are the rank's own, of `own_paths`. One that is not there is no error.
    Raises:
        LocalError: It is no state. Says where in it, and what is there.
    """
    if not isinstance(state, Mapping):
        raise LocalError(f"save() gives a mapping of names to tensors and values, not {type(state).__name__}")
    taken = _Taken(tuple(own))
    structure = taken.node(state, (), None)
    skeleton = _encoder.encode(structure)
    if len(skeleton) > MAX_SKELETON:
        raise LocalError(f"what is no tensor in the state has {len(skeleton)} bytes; at most {MAX_SKELETON} are taken")
    return FlatState(skeleton, tuple(taken.tensors), tuple(taken.lines), taken.own)


def tensors_of(state: object, own: Sequence[tuple[str, ...]] = ()) -> list[tuple[str, Any]]:
    """Return the tensors of a state with their paths, in the order of `flatten`, without reading any.

    Args:
        state: A mapping.
        own: As for `flatten`.
    Raises:
        LocalError: It is no state.
    """
    if not isinstance(state, Mapping):
        raise LocalError(f"save() gives a mapping of names to tensors and values, not {type(state).__name__}")
    taken = _Tensors(tuple(own))
    taken.node(state, (), None)
    return taken.values


def rebuild(
    skeleton: bytes, tensors: Sequence[Any], own: Mapping[tuple[str | int, ...], Any] | None = None
) -> dict[str | int, Any]:
    """Put a state together.

    Args:
        skeleton: Of `flatten`, perhaps on another rank.
        tensors: In their order.
        own: What is this rank's own, by path.
    Raises:
        LocalError: The skeleton is none, is not one of so many tensors, or has no place for what is this rank's own.
    """
    try:
        found = _decoder.decode(skeleton)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LocalError(f"malformed skeleton: {error}") from error
    reader = _Reader(tensors)
    state = reader.node(found, 0)
    if not isinstance(state, dict) or reader.used != len(tensors):
        raise LocalError(f"malformed skeleton: no mapping with {len(tensors)} tensors")
    for path, value in (own or {}).items():
        place: Any = state
        for key in path[:-1]:
            place = _below(place, key)
        if not isinstance(place, dict):
            raise LocalError(f"the state that came has no place for this rank's own {_text(path)!r}")
        place[path[-1]] = value
    return state


@dataclass(frozen=True, slots=True)
class _Described:
    """In the place of a tensor that is not here."""

    dtype: str
    shape: tuple[int, ...]
    digest: bytes


def described_digest(skeleton: bytes, tensors: Sequence[tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """Return the digest that `flatten` gives for a state of which only a description is here.

    Args:
        skeleton: Of `flatten`, perhaps on another rank.
        tensors: Type, shape and digest of each, in their order.
    Raises:
        LocalError: The skeleton is none, or is not one of so many tensors.
    """
    taken = _Taken(())
    taken.node(rebuild(skeleton, [_Described(*each) for each in tensors]), (), None)
    return FlatState(skeleton, (), tuple(taken.lines), {}).digest


def _below(place: Any, key: str | int) -> Any:
    if isinstance(place, dict):
        return place.get(key)
    return place[key] if isinstance(place, list | tuple) and isinstance(key, int) and key < len(place) else None


def _text(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


class _Taken:
    """What `flatten` has come by so far."""

    def __init__(self, own: tuple[tuple[str, ...], ...]) -> None:
        self._own = own
        self.tensors: list[FlatTensor] = []
        self.lines: list[Line] = []
        self.own: dict[tuple[str | int, ...], Any] = {}

    def node(self, value: Any, path: tuple[str | int, ...], key: str | int | None) -> Any:
        """Note the line of one node and of all below it; return its part of the skeleton."""
        if len(path) > MAX_DEPTH:
            raise LocalError(f"the state {_text(path)!r} is nested deeper than {MAX_DEPTH} levels")
        if len(self.lines) >= MAX_NODES:
            raise LocalError(f"a state has at most {MAX_NODES} values, tensors and containers, this one has more")
        kind = type(value)
        if isinstance(value, Mapping):
            keys = [each for each in _sorted_keys(value, path) if not self._is_own(value, path, each)]
            self._line(path, key, "m", f"mapping of {len(keys)}", len(keys))
            return ["m", [part for each in keys for part in (each, self.node(value[each], (*path, each), each))]]
        if kind is list or kind is tuple:
            self._line(path, key, kind.__name__[0], f"{kind.__name__} of {len(value)}", len(value))
            return [kind.__name__[0], [self.node(item, (*path, at), at) for at, item in enumerate(value)]]
        if kind is _Described:
            size = (value.dtype, value.shape)
            self._line(path, key, "#", f"{value.dtype} {value.shape}", size, value.digest)
            return None
        if isinstance(value, np.ndarray) or _is_tensor(value):
            return self._tensor(value, path, key)
        return self._small(value, path, key)

    def _is_own(self, mapping: Mapping[Any, Any], path: tuple[str | int, ...], key: str | int) -> bool:
        here = (*path, key)
        if tuple(map(str, here)) not in self._own:
            return False
        self.own[here] = mapping[key]
        return True

    def _tensor(self, value: Any, path: tuple[str | int, ...], key: str | int | None) -> Any:
        try:
            read = source(value)
        except LocalError as error:
            raise LocalError(f"the state's {_text(path)!r}: {error.message}") from error
        dtype, shape, digest = read.dtype.name, tuple(read.shape), tensor_digest(read)
        self._line(path, key, "#", f"{dtype} {shape}", (dtype, shape), digest)
        self.tensors.append(FlatTensor(_text(path), value, dtype, shape, read.kind, digest))
        return ["#", len(self.tensors) - 1]

    def _small(self, value: Any, path: tuple[str | int, ...], key: str | int | None) -> Any:
        packed = _packed(value, path)
        name = type(value).__name__
        number = isinstance(value, bool | int | float | complex | np.generic)
        what = f"{name} {value}"[:_SHOWN] if number else name  # no text: it may be a secret
        self._line(path, key, name, what, None, _encoder.encode(packed))
        return packed

    def _line(
        self, path: tuple[str | int, ...], key: str | int | None, tag: str, what: str, size: Any, content: bytes = b""
    ) -> None:
        self.lines.append(Line(_text(path), what, _encoder.encode((len(path), key, tag, size)), content))


class _Tensors(_Taken):
    """The tensors alone."""

    def __init__(self, own: tuple[tuple[str, ...], ...]) -> None:
        super().__init__(own)
        self.values: list[tuple[str, Any]] = []

    def _tensor(self, value: Any, path: tuple[str | int, ...], key: str | int | None) -> Any:
        self.values.append((_text(path), value))

    def _small(self, value: Any, path: tuple[str | int, ...], key: str | int | None) -> Any:
        pass

    def _line(
        self, path: tuple[str | int, ...], key: str | int | None, tag: str, what: str, size: Any, content: bytes = b""
    ) -> None:
        pass


def _sorted_keys(value: Mapping[Any, Any], path: tuple[str | int, ...]) -> Iterator[str | int]:
    for key in value:
        if type(key) is int and -_WORD <= key < 2 * _WORD:
            continue
        if type(key) is not str:
            where = f"of {_text(path)!r} in the state" if path else "of the state"
            raise LocalError(f"a key {where} is a str or an int, not {key!r} ({type(key).__name__})")
        _encodable(key, (*path, key))
    yield from sorted(key for key in value if isinstance(key, int))
    yield from sorted(key for key in value if isinstance(key, str))


def _encodable(text: str, path: tuple[str | int, ...]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise LocalError(f"the state's {_text(path)!a} is no text that can be encoded: {text!r}") from None


def _is_tensor(value: Any) -> bool:
    return any(kind.__module__ == "torch" and kind.__name__ == "Tensor" for kind in type(value).__mro__)


def _packed(value: Any, path: tuple[str | int, ...]) -> Any:
    """Return what msgpack is to hold of a small value."""
    kind = type(value)
    if kind is str:
        _encodable(value, path)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        if -_WORD <= value < 2 * _WORD:
            return value
        if value.bit_length() < MAX_INT_BITS:
            return ["i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)]
        raise LocalError(f"the state's {_text(path)!r} is an int of {value.bit_length()} bits; at most {MAX_INT_BITS}")
    if kind is complex:
        return ["c", value.real, value.imag]
    if isinstance(value, np.generic):
        try:
            return ["s", source(np.asarray(value)).dtype.name, value.tobytes()]
        except LocalError as error:
            raise LocalError(f"the state's {_text(path)!r}: {error.message}") from error
    raise LocalError(
        f"the state's {_text(path)!r} is a {kind.__module__}.{kind.__qualname__}: a state holds tensors, numbers, "
        "text, bytes, None, and mappings, lists and tuples of these"
    )


class _Reader:
    """Reads a skeleton that another rank sent. used: how many tensors it has named, each once and in order."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors
        self._nodes = 0
        self.used = 0

    def node(self, found: Any, depth: int) -> Any:
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise LocalError("malformed skeleton: too deep, or too many values")
        match found:
            case None | bool() | int() | float() | str() | bytes():
                return found
            case ["m", list(pairs)] if len(pairs) % 2 == 0:
                keys, values = pairs[::2], pairs[1::2]
                if not all(type(key) in (int, str) for key in keys):
                    raise LocalError("malformed skeleton: a key is neither text nor int")
                return {key: self.node(value, depth + 1) for key, value in zip(keys, values, strict=True)}
            case ["l", list(items)]:
                return [self.node(item, depth + 1) for item in items]
            case ["t", list(items)]:
                return tuple(self.node(item, depth + 1) for item in items)
            case ["#", int(number)] if number == self.used < len(self._tensors):
                self.used += 1
                return self._tensors[number]
            case ["i", bytes(data)] if len(data) <= MAX_INT_BITS // 8 + 1:
                return int.from_bytes(data, "big", signed=True)
            case ["c", float(real), float(imaginary)]:
                return complex(real, imaginary)
            case ["s", str(name), bytes(data)]:
                return _scalar(name, data)
        raise LocalError(f"malformed skeleton: {str(found)[:80]!r}")


def _scalar(name: str, data: bytes) -> Any:
    dtype = DType.parse(name)
    if len(data) != dtype.itemsize:
        raise LocalError(f"malformed skeleton: a {name} of {len(data)} bytes")
    return wrap(np.frombuffer(data, dtype.storage).copy(), dtype, (), "numpy")[()]
