"""One rank's data file: safetensors, written by a rank as its share, read piece by piece as a manifest describes it.

The header is written here and not by the safetensors package, whose interface leaves no place for a sync before a
rename, and reading goes by the manifest: only the bytes that are wanted, each piece against its digest. Any program
that reads safetensors can read the file. A tensor that is whole in it has its own name, a piece one such as
"w@[0:100, 0:64]".

Digests are made in threads beside the disk's work (`digesting`), both ways. What is read goes where it belongs at once,
if it lies in one place there, and is taken for right when its digest is:

    wanted --read--> under way, its place is its own --digest right--> there
                                                     --digest wrong, or the file fails--> wanted, from a copy

Invariants of reading. A byte of the memory has one piece under way at most, and none once it is there, so a damaged
piece overwrites nothing that is right. Memory is given out only when all of it is there. Beside it there are at most
BESIDE pieces, which do not lie in one place in it, or are larger than what is wanted of them.

No pickle: reading a file runs no code of it.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quicoll.checkpoint.catalogue import aside_name, data_name
from quicoll.checkpoint.digesting import Digesting
from quicoll.checkpoint.manifest import (
    CheckpointManifest,
    FileRecord,
    PieceRecord,
    RankShare,
    SavedTensor,
    digest_of,
    metadata_digest,
)
from quicoll.checkpoint.parts import HeldPart, Memory
from quicoll.checkpoint.regions import Region, overlap_of, uncovered, without
from quicoll.checkpoint.storage import Storage, os_reason
from quicoll.errors import CheckpointError

if TYPE_CHECKING:
    from quicoll.checkpoint.parts import Array

__all__ = ["Piece", "PieceReader", "check_files", "write_share"]

Piece = tuple[HeldPart, Region, memoryview]
"""A region of a part, and its bytes."""

BESIDE = 2
"""Pieces in memory of their own while regions are read, so that one is digested while the next one is read."""
_UNDER_WAY = 32
"""Pieces whose digest is waited for. They are in their place: it bounds what is read in vain once one is damaged."""


def write_share(
    storage: Storage,
    *,
    step: int,
    rank: int,
    node: str,
    parts: Sequence[HeldPart],
    pieces: Sequence[Piece],
    metadata: Mapping[str, str],
) -> RankShare:
    """Write a rank's file; it is durable on return.

    Args:
        storage: Where.
        step: The step whose state it is.
        rank: This rank.
        node: Its name.
        parts: All that it holds.
        pieces: What it writes. Their bytes must not change until this returns.
        metadata: The user's.
    Raises:
        CheckpointError: It cannot be written; nothing of it is there.
    """
    numbers = {(part.node, part.name): number for number, part in enumerate(parts)}
    tensors = tuple(
        SavedTensor(name=part.name, dtype=part.code, shape=part.shape, node=part.node, torch=part.of_torch)
        for part in parts
    )
    # Wide elements first, as the safetensors package writes: then every tensor is aligned for readers that map it.
    ordered = sorted((piece for piece in pieces if piece[2].nbytes), key=lambda piece: -piece[0].width)
    if not ordered:
        return RankShare(rank, node, metadata_digest(metadata), tensors, (), ())
    header = _header(ordered, [part for part in parts if not part.region.size], step=step, rank=rank, node=node)
    name = data_name(step, rank, storage.token())
    with Digesting() as digesting:
        waiting = [digesting.begin(data) for _, _, data in ordered]
        try:
            storage.write(name, [header, *(data for _, _, data in ordered)])
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint of step {step}: {os_reason(error)}", path=storage.path(name)
            ) from error
        digests = [each.result() for each in waiting]
    records, at = [], len(header)
    for (part, region, data), digest in zip(ordered, digests, strict=True):
        records.append(
            PieceRecord(
                tensor=numbers[part.node, part.name],
                file=0,
                offset=region.offset,
                shape=region.shape,
                at=at,
                nbytes=data.nbytes,
                digest=digest,
            )
        )
        at += data.nbytes
    file = FileRecord(name=name, rank=rank, node=node, nbytes=at, begin=len(header), digest=digest_of(header))
    return RankShare(rank, node, metadata_digest(metadata), tensors, (file,), tuple(records))


def _header(pieces: Sequence[Piece], empty: Sequence[HeldPart], *, step: int, rank: int, node: str) -> bytes:
    header: dict[str, object] = {
        "__metadata__": {"quicoll.step": str(step), "quicoll.rank": str(rank), "quicoll.node": node}
    }
    offset = 0
    for part, region, data in pieces:
        label = part.name if region.shape == part.shape else f"{part.name}@{region}"
        if part.node:
            label = f"{label}@{part.node}"
        while label in header:  # a user's own name may look like one of these
            label += "'"
        end = offset + data.nbytes
        header[label] = {"dtype": part.code, "shape": list(region.shape), "data_offsets": [offset, end]}
        offset = end
    for part in empty:
        if part.name not in header:
            header[part.name] = {"dtype": part.code, "shape": list(part.region.shape), "data_offsets": [offset, offset]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for tensor data that begins at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


def check_files(storage: Storage, manifest: CheckpointManifest, *, shared: bool, node: str) -> None:
    """See that the files of a manifest are there before it is written, with as many bytes as were told.

    Args:
        storage: Where.
        manifest: What is to be complete.
        shared: Whether all ranks write to the same place; otherwise only this node's are looked for.
        node: This rank's name.
    Raises:
        CheckpointError: One is missing or has another size. Names it, and who wrote it.
    """
    for file in manifest.files:
        if not shared and file.node != node:
            continue
        try:
            size = storage.size(file.name)
        except OSError as error:
            raise CheckpointError(
                f"the file that {file.node} wrote is not seen from {node}: {os_reason(error)}; do all ranks write to"
                " one place? Where each has a disk of its own, say so: shared=False",
                path=storage.path(file.name),
            ) from error
        if size != file.nbytes:
            raise CheckpointError(
                f"the file that {file.node} wrote has {size} bytes here, not {file.nbytes}",
                path=storage.path(file.name),
            )


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a piece may be read. aside: in a file of its own, and not in the one that the manifest names."""

    piece: int
    aside: bool


@dataclass(slots=True)
class _Filling:
    """A region that is read. left: what is neither there nor under way."""

    number: int
    wanted: Region
    memory: Memory
    left: list[Region]
    failure: CheckpointError | None


@dataclass(slots=True)
class _UnderWay:
    """A piece that was read and is not compared yet. parts: of the region, what it is to give. own: whether its data is
    memory of its own, from which the parts are copied."""

    filling: _Filling
    source: _Source
    parts: list[Region]
    data: memoryview
    own: bool
    digest: Future[str]


class PieceReader:
    """Reads regions of the tensors of one checkpoint: only the pieces that are wanted, and each is checked.

    A piece is in its file, or aside: in a file of its own, named by its digest, where it was put because its file is on
    another node's disk (`put_aside`). Such files are temporary ones, and no part of the checkpoint.
    """

    def __init__(self, storage: Storage, manifest: CheckpointManifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._checked: dict[int, CheckpointError | None] = {}
        self._bad: dict[_Source, CheckpointError] = {}  # what was read, and was not right
        self._aside: dict[int, None] = {}  # pieces that are known to be aside
        self._put: dict[int, None] = {}  # pieces that were put there by this reader
        by_tensor: list[list[int]] = [[] for _ in manifest.tensors]
        for number, piece in enumerate(manifest.pieces):
            by_tensor[piece.tensor].append(number)
        self._by_tensor = by_tensor

    def region(self, number: int, wanted: Region) -> Array:
        """Return a region of a tensor in new memory; see `regions`."""
        return self.regions([(number, wanted)])[0]

    def regions(self, wanted: Sequence[tuple[int, Region]]) -> list[Array]:
        """Return regions of tensors in new memory.

        Where a piece is damaged or not here, copies of it are tried.

        Args:
            wanted: Tensors' numbers, and regions within them.
        Raises:
            CheckpointError: A piece is damaged or missing; names its file.
        """
        known = []
        for number, region in wanted:  # all of them before anything is read
            failure, sources = self._sources(number, region)
            # Before memory is taken: what a manifest describes has to be in files that really have so many bytes.
            gap = uncovered(region, [self._region_of(each) for each in sources])
            if gap is not None:
                raise failure or self._in_no_file(gap, number)
            known.append((failure, sources))
        fillings: list[_Filling] = []
        under_way: deque[_UnderWay] = deque()
        with Digesting() as digesting:
            for (number, region), (failure, sources) in zip(wanted, known, strict=True):
                tensor = self._manifest.tensors[number]
                memory = Memory(tensor.dtype, region, of_torch=tensor.torch)
                fillings.append(_Filling(number, region, memory, [region] if region.size else [], failure))
                self._begin(fillings[-1], sources, under_way, digesting)
            self._settle(under_way, most=0)
            for filling in fillings:
                # Something was not right. What has it too is read, and once more if it has been read for less. What is
                # wrong is a source no more, and what is right leaves nothing of it to be read: so this has an end.
                while filling.left:
                    _, sources = self._sources(filling.number, filling.wanted)
                    if not self._begin(filling, sources, under_way, digesting):
                        raise filling.failure or self._in_no_file(filling.left[0], filling.number)
                    self._settle(under_way, most=0)
        return [filling.memory.array() for filling in fillings]

    def _begin(
        self, filling: _Filling, sources: Sequence[_Source], under_way: deque[_UnderWay], digesting: Digesting
    ) -> bool:
        """Read what is left of a region, as far as these sources have it; whether there was anything to read."""
        begun = False
        for source in sources:
            piece = self._manifest.pieces[source.piece]
            parts, place = self._wanted_of(piece.region, filling)
            if not parts:
                continue
            if place is None:
                self._settle(under_way, most=_UNDER_WAY, beside=BESIDE - 1)
                parts, place = self._wanted_of(piece.region, filling)  # anew: something damaged may be wanted again
            begun, own = True, place is None
            data = np.empty(piece.nbytes, np.uint8).data if place is None else place
            failure = self._read_source(source, data)
            if failure is not None:
                self._failed(filling, source, failure)
                continue
            filling.left = [rest for each in filling.left for rest in without(each, piece.region)]
            under_way.append(_UnderWay(filling, source, parts, data, own, digesting.begin(data)))
            self._settle(under_way, most=_UNDER_WAY, beside=BESIDE)
        return begun

    def _wanted_of(self, region: Region, filling: _Filling) -> tuple[list[Region], memoryview | None]:
        """What of a piece is left to read now; and its place in the memory, where all of it is and lies together."""
        parts = [part for each in filling.left if (part := overlap_of(region, each)) is not None]
        whole = bool(parts) and uncovered(region, parts) is None
        return parts, filling.memory.place(region) if whole else None

    def _settle(self, under_way: deque[_UnderWay], *, most: int, beside: int = BESIDE) -> None:
        """Compare what was read, oldest first, until no more is under way than this."""
        while under_way and (
            len(under_way) > most or under_way[0].digest.done() or sum(each.own for each in under_way) > beside
        ):
            each = under_way.popleft()
            piece = self._manifest.pieces[each.source.piece]
            if each.digest.result() != piece.digest:
                each.filling.left += each.parts
                self._failed(each.filling, each.source, self._damaged(each.source))
            elif each.own:
                for part in each.parts:
                    each.filling.memory.fill(piece.region, each.data, part)

    def _failed(self, filling: _Filling, source: _Source, failure: CheckpointError) -> None:
        self._bad[source] = failure
        filling.failure = filling.failure or failure

    def _in_no_file(self, gap: Region, number: int) -> CheckpointError:
        return CheckpointError(f"{gap} of tensor {self._manifest.tensors[number].name!r} is in no file")

    def lacking(self, number: int, wanted: Region) -> list[int]:
        """Return the pieces that would make a region whole that cannot be read here, one of each region; by number.

        One that was put aside here and is damaged there is not among them: a disk that spoils what it is given would
        have it come again for ever.

        Args:
            number: Of the tensor.
            wanted: Within it.
        """
        _, sources = self._sources(number, wanted)
        left = [wanted] if wanted.size else []
        for each in sources:
            left = [rest for part in left for rest in without(part, self._region_of(each))]
        found = []
        for piece in self._by_tensor[number]:
            if piece in self._put and _Source(piece, aside=True) in self._bad:
                continue
            region = self._manifest.pieces[piece].region
            if any(overlap_of(region, part) is not None for part in left):
                found.append(piece)
                left = [rest for part in left for rest in without(part, region)]
        return found

    def files_here(self) -> list[int]:
        """Return the numbers of the manifest's files that are here, with the size and the header that they should."""
        return [file for file in range(len(self._manifest.files)) if self._file_trouble(file) is None]

    def piece(self, number: int) -> memoryview:
        """Return the bytes of a piece.

        Raises:
            CheckpointError: It is damaged or missing; names its file.
        """
        piece = self._manifest.pieces[number]
        failure = self._file_trouble(piece.file)
        sources = ([] if failure else [_Source(number, aside=False)]) + (
            [_Source(number, aside=True)] if self._is_aside(number) else []
        )
        for source in sources:
            data = np.empty(piece.nbytes, np.uint8).data
            wrong = self._read_source(source, data)
            if wrong is None and digest_of(data) == piece.digest:
                return data
            self._bad[source] = wrong = wrong or self._damaged(source)
            failure = failure or wrong
        raise failure or AssertionError("a file without trouble is a source")

    def put_aside(self, number: int, data: memoryview) -> None:
        """Keep a piece that came from another node's disk, until `drop_aside`; also for the next process.

        Args:
            number: Of the piece.
            data: Its bytes.
        Raises:
            CheckpointError: They are not its bytes, or cannot be written.
        """
        piece = self._manifest.pieces[number]
        name = self._manifest.tensors[piece.tensor].name
        if data.nbytes != piece.nbytes or digest_of(data) != piece.digest:
            raise CheckpointError(f"{piece.region} of tensor {name!r} came with other bits than were saved")
        try:
            self._storage.write(self._name_aside(number), [data])
        except OSError as error:
            raise CheckpointError(
                f"cannot keep {piece.region} of tensor {name!r}, which came from another node: {os_reason(error)}",
                path=self._storage.where,
            ) from error
        self._aside[number] = self._put[number] = None
        self._bad.pop(_Source(number, aside=True), None)

    def drop_aside(self) -> None:
        """Take away what was put aside. What cannot be removed now is removed as any temporary file."""
        names = [self._name_aside(number) for number in self._aside]
        self._aside = {}
        with contextlib.suppress(OSError):
            self._storage.remove(names)

    def _name_aside(self, number: int) -> str:
        return aside_name(self._manifest.step, self._manifest.pieces[number].digest)

    def _is_aside(self, number: int) -> bool:
        if _Source(number, aside=True) in self._bad:
            return False
        if number not in self._aside:
            try:
                if self._storage.size(self._name_aside(number)) != self._manifest.pieces[number].nbytes:
                    return False
            except OSError:
                return False
            self._aside[number] = None
        return True

    def _sources(self, number: int, wanted: Region) -> tuple[CheckpointError | None, list[_Source]]:
        """Where the pieces of a tensor that meet a region can be read, as far as is known; the first error."""
        failure, found = None, []
        for each in self._by_tensor[number]:
            piece = self._manifest.pieces[each]
            if overlap_of(piece.region, wanted) is None:
                continue
            source = _Source(each, aside=False)
            error = self._file_trouble(piece.file) or self._bad.get(source)
            if error is None:
                found.append(source)
            elif self._is_aside(each):
                found.append(_Source(each, aside=True))
            failure = failure or error
        return failure, found

    def _region_of(self, source: _Source) -> Region:
        return self._manifest.pieces[source.piece].region

    def _read_source(self, source: _Source, memory: memoryview) -> CheckpointError | None:
        """Read a piece's bytes, whatever they are; what went wrong."""
        piece = self._manifest.pieces[source.piece]
        name = self._name_aside(source.piece) if source.aside else self._manifest.files[piece.file].name
        try:
            came = self._storage.read_into(name, 0 if source.aside else piece.at, memory)
        except OSError as error:
            return CheckpointError(f"cannot read the checkpoint: {os_reason(error)}", path=self._storage.path(name))
        return None if came == piece.nbytes else self._damaged(source)

    def _damaged(self, source: _Source) -> CheckpointError:
        piece = self._manifest.pieces[source.piece]
        file = self._manifest.files[piece.file]
        name = self._manifest.tensors[piece.tensor].name
        if source.aside:
            return CheckpointError(
                f"{piece.region} of tensor {name!r}, which came from another node's disk, is damaged here",
                path=self._storage.path(self._name_aside(source.piece)),
            )
        return CheckpointError(
            f"{piece.region} of tensor {name!r} is damaged: not the bytes that were written"
            f"{f' by {file.node}' if file.node else ''}",
            path=self._storage.path(file.name),
        )

    def _file_trouble(self, number: int) -> CheckpointError | None:
        if number not in self._checked:
            self._checked[number] = self._trouble(self._manifest.files[number])
        return self._checked[number]

    def _trouble(self, file: FileRecord) -> CheckpointError | None:
        path = self._storage.path(file.name)
        try:
            size = self._storage.size(file.name)
            if size != file.nbytes:
                return CheckpointError(f"the file has {size} bytes, not {file.nbytes}", path=path)
            if digest_of(self._storage.read(file.name, 0, file.begin)) != file.digest:
                return CheckpointError("the file's header is damaged", path=path)
        except OSError as error:
            return CheckpointError(f"cannot read the checkpoint: {os_reason(error)}", path=path)
        return None
