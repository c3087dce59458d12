"""One rank's data file: safetensors, written by a rank as its share, read piece by piece as a manifest describes it.

The header is written here and not by the safetensors package, whose interface leaves no place for a sync before a
rename, and reading goes by the manifest: only the bytes that are wanted, each piece against its digest. Any program
that reads safetensors can read the file. A tensor that is whole in it has its own name, a piece one such as
"w@[0:100, 0:64]".

No pickle: reading a file runs no code of it.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quicoll.checkpoint.catalogue import aside_name, data_name
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
    records, at = [], len(header)
    for part, region, data in ordered:
        records.append(
            PieceRecord(
                tensor=numbers[part.node, part.name],
                file=0,
                offset=region.offset,
                shape=region.shape,
                at=at,
                nbytes=data.nbytes,
                digest=digest_of(data),
            )
        )
        at += data.nbytes
    file = FileRecord(name=name, rank=rank, node=node, nbytes=at, begin=len(header), digest=digest_of(header))
    try:
        storage.write(name, [header, *(data for _, _, data in ordered)])
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {step}: {os_reason(error)}", path=storage.path(name)
        ) from error
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


class PieceReader:
    """Reads regions of the tensors of one checkpoint: only the pieces that are wanted, and each is checked.

    A piece is in its file, or aside: in a file of its own, named by its digest, where it was put because its file is on
    another node's disk (`put_aside`). Such files are temporary ones, and no part of the checkpoint.
    """

    def __init__(self, storage: Storage, manifest: CheckpointManifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._checked: dict[int, CheckpointError | None] = {}
        self._bad: dict[int, CheckpointError] = {}  # pieces that were read, and were not right
        self._aside: dict[int, None] = {}  # pieces that are known to be aside
        by_tensor: list[list[int]] = [[] for _ in manifest.tensors]
        for number, piece in enumerate(manifest.pieces):
            by_tensor[piece.tensor].append(number)
        self._by_tensor = by_tensor

    def region(self, number: int, wanted: Region) -> Array:
        """Return a region of a tensor in new memory.

        Where a piece is damaged or not here, copies of it are tried.

        Args:
            number: Of the tensor.
            wanted: Within it.
        Raises:
            CheckpointError: A piece is damaged or missing; names its file.
        """
        tensor = self._manifest.tensors[number]
        left = [wanted] if wanted.size else []
        failure, readable = self._readable(number, wanted)
        # Before memory is taken: what a manifest describes has to be in files that really have so many bytes.
        gap = uncovered(wanted, [self._manifest.pieces[each].region for each in readable])
        if gap is not None:
            raise failure or CheckpointError(f"{gap} of tensor {tensor.name!r} is in no file")
        memory = Memory(tensor.dtype, wanted, of_torch=tensor.torch)
        for each in readable:
            piece = self._manifest.pieces[each]
            if not any(overlap_of(piece.region, part) is not None for part in left):
                continue
            try:
                data = self.piece(each)
            except CheckpointError as error:
                failure = failure or error
                continue
            common = overlap_of(piece.region, wanted)
            if common is not None:
                memory.fill(piece.region, data, common)
            left = [rest for part in left for rest in without(part, piece.region)]
        if left:
            raise failure or CheckpointError(f"{left[0]} of tensor {tensor.name!r} is in no file")
        return memory.array()

    def lacking(self, number: int, wanted: Region) -> list[int]:
        """Return the pieces that would make a region whole that cannot be read here, one of each region; by number.

        Args:
            number: Of the tensor.
            wanted: Within it.
        """
        _, readable = self._readable(number, wanted)
        left = [wanted] if wanted.size else []
        for each in readable:
            left = [rest for part in left for rest in without(part, self._manifest.pieces[each].region)]
        found = []
        for each in self._by_tensor[number]:
            region = self._manifest.pieces[each].region
            if any(overlap_of(region, part) is not None for part in left):
                found.append(each)
                left = [rest for part in left for rest in without(part, region)]
        return found

    def files_here(self) -> list[int]:
        """Return the numbers of the manifest's files that are here, with the size and the header that they should."""
        return [file for file in range(len(self._manifest.files)) if self._file_trouble(file) is None]

    def piece(self, number: int) -> bytes:
        """Return the bytes of a piece.

        Raises:
            CheckpointError: It is damaged or missing; names its file.
        """
        piece = self._manifest.pieces[number]
        file = self._manifest.files[piece.file]
        failure = self._file_trouble(piece.file)
        if failure is None:
            try:
                data = self._read(file.name, piece.at, piece.at + piece.nbytes)
                if len(data) == piece.nbytes and digest_of(data) == piece.digest:
                    return data
                name = self._manifest.tensors[piece.tensor].name
                failure = CheckpointError(
                    f"{piece.region} of tensor {name!r} is damaged: not the bytes that {file.node} wrote",
                    path=self._storage.path(file.name),
                )
            except CheckpointError as error:
                failure = error
            self._bad[number] = failure
        if self._is_aside(number):
            data = self._read(self._name_aside(number), 0, piece.nbytes + 1)
            if len(data) == piece.nbytes and digest_of(data) == piece.digest:
                return data
            del self._aside[number]
        raise failure

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
        self._aside[number] = None

    def drop_aside(self) -> None:
        """Take away what was put aside. What cannot be removed now is removed as any temporary file."""
        names = [self._name_aside(number) for number in self._aside]
        self._aside = {}
        with contextlib.suppress(OSError):
            self._storage.remove(names)

    def _name_aside(self, number: int) -> str:
        return aside_name(self._manifest.step, self._manifest.pieces[number].digest)

    def _is_aside(self, number: int) -> bool:
        if number not in self._aside:
            try:
                if self._storage.size(self._name_aside(number)) != self._manifest.pieces[number].nbytes:
                    return False
            except OSError:
                return False
            self._aside[number] = None
        return True

    def _readable(self, number: int, wanted: Region) -> tuple[CheckpointError | None, list[int]]:
        """The pieces of a tensor that meet a region and can be read here, as far as is known; the first error."""
        failure, found = None, []
        for each in self._by_tensor[number]:
            piece = self._manifest.pieces[each]
            if overlap_of(piece.region, wanted) is None:
                continue
            error = self._file_trouble(piece.file) or self._bad.get(each)
            if error is None or self._is_aside(each):
                found.append(each)
            failure = failure or error
        return failure, found

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
            if digest_of(self._read(file.name, 0, file.begin)) != file.digest:
                return CheckpointError("the file's header is damaged", path=path)
        except OSError as error:
            return CheckpointError(f"cannot read the checkpoint: {os_reason(error)}", path=path)
        except CheckpointError as error:
            return error
        return None

    def _read(self, name: str, start: int, stop: int) -> bytes:
        try:
            return self._storage.read(name, start, stop)
        except OSError as error:
            raise CheckpointError(
                f"cannot read the checkpoint: {os_reason(error)}", path=self._storage.path(name)
            ) from error
