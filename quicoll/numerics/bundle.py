"""The tensors of one operation: a single one, or a list that travels as one.

A bundle is read as one flat array, the tensors one after the other. A list of few bytes is copied to be that one. Of
others nothing is copied: a piece that lies inside one tensor is that tensor's own memory, and only a piece that spans
several is put together when it is asked for. Results come as they were given: for a list, tensors that share one piece
of memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import xxhash

from quicoll.errors import LocalError
from quicoll.numerics.buffers import Source, argument, arguments, uninitialised
from quicoll.numerics.destinations import Destination, Fresh, allocate, destination, require_apart
from quicoll.numerics.dtypes import Array, DType  # noqa: TC001 - compiled, a class needs it as it is made
from quicoll.numerics.recycled import Recycler  # noqa: TC001 - likewise

__all__ = ["Bundle", "Joined", "Results", "bundle", "flat_pieces", "leaves_like", "like_text", "results", "shape_text"]

_MAX_TEXT = 1000  # of all shapes in a signature


class Joined:
    """Flat arrays of one type, read as if they were one. `joined[a:b]` is a view where one array holds all of it."""

    __slots__ = ("_ends", "_parts", "size")

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = [part for part in parts if part.size] or list(parts[:1])
        self._ends = list(accumulate(part.size for part in self._parts))
        self.size = self._ends[-1]

    def __getitem__(self, where: slice) -> Array:
        start, stop, _ = where.indices(self.size)
        pieces = self.pieces(start, stop)
        if not pieces:
            return self._parts[0][:0]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def pieces(self, start: int, stop: int) -> list[Array]:
        """Return the views that some elements lie in, in their order: those from `start` to before `stop`."""
        at = bisect_right(self._ends, start)
        pieces: list[Array] = []
        while start < stop:
            part, end = self._parts[at], self._ends[at]
            first = end - part.size
            pieces.append(part[start - first : min(stop, end) - first])
            start, at = min(stop, end), at + 1
        return pieces


def flat_pieces(flat: Array | Joined, start: int, stop: int) -> list[Array]:
    """Return the views that some elements of a flat array, or of several read as one, lie in."""
    return flat.pieces(start, stop) if isinstance(flat, Joined) else [flat[start:stop]]


class Bundle:
    """The tensors that a caller passed to one operation.

    Attributes:
        first: The first of them.
        many: Whether they came as a list.
        dtype: Of the elements.
        shapes: Of the tensors, in order.
        elements: Of all of them.
    """

    __slots__ = ("_flats", "_whole", "dtype", "elements", "first", "many", "shapes")

    def __init__(
        self, first: Source, memory: Array | Joined | list[Array], shapes: tuple[tuple[int, ...], ...], *, many: bool
    ) -> None:
        """Take what has been read.

        Args:
            first: The first tensor.
            memory: The elements of all of them, or the memory of each.
            shapes: Of all of them.
            many: Whether they came as a list.
        """
        self.first = first
        self._flats: list[Array] | None = None
        self._whole: Array | Joined | None = None
        if isinstance(memory, list):
            self._flats = memory
            self.elements = sum([each.size for each in memory])
        else:
            self._whole = memory
            self.elements = memory.size
        self.many = many
        self.dtype = first.dtype
        self.shapes = shapes

    @classmethod
    def of(cls, source: Source) -> Bundle:
        """Return the bundle of a tensor that came alone."""
        return cls(source, source.flat, (source.shape,), many=False)

    def at(self, memory: Array | Joined) -> Bundle:
        """Return a bundle of tensors of the same shapes, whose elements lie in `memory`."""
        return Bundle(self.first, memory, self.shapes, many=self.many)

    @property
    def flats(self) -> list[Array]:
        """The memory of each of them."""
        if self._flats is None:
            ends = [0, *accumulate(map(math.prod, self.shapes))]
            self._flats = [self.flat[start:stop] for start, stop in pairwise(ends)]
        return self._flats

    @property
    def flat(self) -> Array | Joined:
        """The memory of all of them as one."""
        if self._whole is None:
            flats = self.flats
            self._whole = flats[0] if len(flats) == 1 else Joined(flats)
        return self._whole

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def text(self) -> str:
        """Type and shapes, for a signature; of many shapes a digest stands for the rest."""
        return like_text(self.dtype, self.shapes, many=self.many)

    @property
    def brief(self) -> str:
        """The same for people, and for audits."""
        return f"{self.dtype} {_shapes_text(self.shapes, many=self.many)}"

    def is_like(self, other: Bundle) -> bool:
        return self.many == other.many and self.dtype is other.dtype and self.shapes == other.shapes


def bundle(x: Any) -> Bundle:
    """View a tensor, or a list or tuple of them, as a bundle.

    Args:
        x: The tensor or tensors.
    Returns:
        The bundle; nothing is copied.
    Raises:
        LocalError: Not tensors, an empty list, or types or kinds differ; or a tensor requires grad, see `argument`.
    """
    if not isinstance(x, (list, tuple)):
        return Bundle.of(argument(x))
    if not x:
        raise LocalError("a list of no tensors")
    try:
        plain = arguments(x)
        if plain is not None:
            return Bundle(*plain, many=True)
        sources = [argument(each) for each in x]
    except LocalError:
        _demand_tensors(x)
        raise
    dtype, kind = sources[0].dtype, sources[0].kind
    for index, each in enumerate(sources):
        if each.dtype is not dtype or each.kind != kind:
            raise LocalError(
                f"tensors of one list differ: {sources[0].kind} {sources[0].dtype} and, at {index}, {each.kind} "
                f"{each.dtype}; make a call for each type"
            )
    return Bundle(sources[0], [each.flat for each in sources], tuple([each.shape for each in sources]), many=True)


def leaves_like(values: Sequence[Any]) -> tuple[Array | list[Array], Bundle] | None:
    """View the leaves of a reduction at once, where each of them is one tensor, and plain.

    Args:
        values: One at least.
    Returns:
        The leaves, as rows of one array or the memory of each; and the bundle of one of them. None where `bundle` has
        to look at each.
    Raises:
        LocalError: As `bundle`, for the first.
    """
    if isinstance(values[0], (list, tuple)):
        return None
    plain = arguments(values)
    if plain is None:
        return None
    first, memory, shapes = plain
    if shapes.count(first.shape) != len(shapes):
        return None
    rows = memory if isinstance(memory, list) else memory.reshape(len(shapes), first.flat.size)
    return rows, Bundle(first, first.flat, (first.shape,), many=False)


def _demand_tensors(x: Sequence[Any]) -> None:
    """Raise LocalError where an item of a list is no tensor, but perhaps what one is made of."""
    for index, value in enumerate(x):
        if isinstance(value, int | float | complex | str | list | tuple) and not isinstance(value, np.generic):
            raise LocalError(
                f"item {index} of the list is a {type(value).__name__}; pass numpy.asarray(x, dtype), "
                "torch.as_tensor(x), or a list of arrays or tensors"
            )


def like_text(dtype: DType, shapes: tuple[tuple[int, ...], ...], *, many: bool) -> str:
    """Return `Bundle.text` of tensors of this type and these shapes. many: whether they came as a list."""
    return f"dtype={dtype} shape={_shapes_text(shapes, many=many)}"


def _shapes_text(shapes: tuple[tuple[int, ...], ...], *, many: bool) -> str:
    text = ";".join(map(shape_text, shapes))
    if len(text) > _MAX_TEXT:
        text = f"{text[:100]}... {len(shapes)} tensors, {xxhash.xxh3_64_hexdigest(text.encode())}"
    return f"{'list:' if many else ''}{text}"


def shape_text(shape: tuple[int | str, ...]) -> str:
    return f"({','.join(map(str, shape))})"


class Results(Protocol):
    """Memory for the results of an operation, and the way to the caller's tensors (`commit`)."""

    @property
    def flat(self) -> Array:
        """The memory of all of them, 1-D and writable."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether the memory is the caller's `out` itself, which changes as the result comes."""
        ...

    def aside(self, recycler: Recycler | None) -> Results:
        """Return them with memory beside `out`. Raises LocalError where there is none."""
        ...

    def commit(self) -> Any:
        """Return the result; with `out`, write it there now."""
        ...


@dataclass(slots=True, eq=False)  # as a Source
class _FreshList:
    """Results of a list, in one piece of memory."""

    whole: Destination | Fresh
    shapes: tuple[tuple[int, ...], ...]
    in_place = False

    @property
    def flat(self) -> Array:
        return self.whole.flat

    def aside(self, recycler: Recycler | None) -> _FreshList:
        return self

    def commit(self) -> Any:
        value = self.whole.commit()
        ends = [0, *accumulate(math.prod(shape) for shape in self.shapes)]
        return [value[ends[i] : ends[i + 1]].reshape(shape) for i, shape in enumerate(self.shapes)]


@dataclass(slots=True, eq=False)  # as a Source
class _GivenList:
    """Results of a list, in memory of their own until they are written to the caller's `out`."""

    flat: Array
    places: tuple[Destination, ...]
    in_place = False

    def aside(self, recycler: Recycler | None) -> _GivenList:
        return self

    def commit(self) -> Any:
        ends = [0, *accumulate(place.size for place in self.places)]
        return [place.commit(self.flat[ends[i] : ends[i + 1]]) for i, place in enumerate(self.places)]


def results(
    out: Any,
    like: Bundle,
    shape: tuple[int, ...] | None = None,
    *,
    apart_from: Sequence[Any] | None = None,
    recycler: Recycler | None = None,
) -> Results:
    """Provide memory for results.

    Args:
        out: None, or where the caller wants them: a tensor, or a list of as many as there are.
        like: The results are like these.
        shape: Another shape, where `like` is no list.
        apart_from: As for `destination`, where `out` is no list.
        recycler: Gives memory that has been used before, for large ones; None: it is new.
    Returns:
        The memory.
    Raises:
        LocalError: `out` does not fit, tensors of it share memory, or there is no memory.
    """
    first = like.first
    if not like.many:
        if out is None:
            return allocate(first, shape, recycler)
        return destination(out, first, shape, apart_from=apart_from, recycler=recycler)
    if out is None:
        return _FreshList(allocate(first, (like.elements,), recycler), like.shapes)
    if not isinstance(out, list | tuple) or len(out) != len(like.shapes):
        raise LocalError(f"out must be a list of {len(like.shapes)} tensors, as the input is")
    places = tuple(
        [destination(place, first, shape, buffered=False) for place, shape in zip(out, like.shapes, strict=True)]
    )
    require_apart(places)
    return _GivenList(uninitialised(like.elements, like.dtype, recycler), places)
