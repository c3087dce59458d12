"""The manifest of a checkpoint: every tensor, every piece of it, in which file it lies, and its digest. Versioned JSON.

    {"seal": SHA-256 of the bytes of "content",
     "content": {"format": "quicoll.checkpoint", "version": 2, "step", "view", "world_size", "metadata",
                 "tensors": [{name, dtype, shape, node, torch}],
                 "files":   [{name, rank, node, nbytes, begin, digest}],      begin, digest: of the file's header
                 "pieces":  [{tensor, file, offset, shape, at, nbytes, digest}]}}

All digests are SHA-256 in hexadecimal, of the bytes as they are in the file: who can make another file with the digest
that the ranks agreed on has broken it. Version 1 had BLAKE2b-256 in their place. What is in another version is refused,
and the error says so: there is one way of reading.

A region may be in several pieces: copies, where every rank wrote to its own disk. Each rank tells the others its
`RankShare`; `merged` makes the manifest of all of them, the same bytes on every rank.

Invariants of a manifest that `merged` or `decoded` gives: each tensor is covered by its pieces; each piece lies within
its tensor and its file and has as many bytes as its region; pieces of one file do not overlap, so no manifest describes
more memory than its files have bytes; a file's name is one of `catalogue`, of the manifest's step, so none leads out of
the directory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from quicoll.checkpoint.catalogue import DATA
from quicoll.checkpoint.parts import width_of
from quicoll.checkpoint.regions import Region, uncovered
from quicoll.errors import CheckpointError, LocalError

__all__ = [
    "FORMAT",
    "MAX_MANIFEST_BYTES",
    "VERSION",
    "CheckpointManifest",
    "FileRecord",
    "PieceRecord",
    "RankShare",
    "SavedTensor",
    "decoded",
    "decoded_share",
    "digest_of",
    "encoded",
    "encoded_share",
    "merged",
    "metadata_digest",
]

FORMAT = "quicoll.checkpoint"
VERSION = 2
MAX_MANIFEST_BYTES = 256 << 20
_MAX_DIMENSIONS = 64
_MAX_LENGTH = 1 << 62


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor. dtype: safetensors' name. node: whose own it is, "" for all. torch: whether it was torch's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    node: str = ""
    torch: bool = False

    @property
    def region(self) -> Region:
        """All of it."""
        return Region.whole(self.shape)


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One data file. rank, node: who wrote it. begin: bytes of its header. digest: of its header."""

    name: str
    rank: int
    node: str
    nbytes: int
    begin: int
    digest: str


class PieceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece. tensor, file: their numbers. offset, shape: its region. at: its first byte in the file."""

    tensor: int
    file: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    at: int
    nbytes: int
    digest: str

    @property
    def region(self) -> Region:
        """What it holds of its tensor."""
        return Region(self.offset, self.shape)


class RankShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank has written.

    metadata: the digest of the user's, by `metadata_digest`. tensors: all that it holds. files: one, or none where it
    had nothing to write. pieces: in it, with numbers of this rank's own tensors and files.
    """

    rank: int
    node: str
    metadata: str
    tensors: tuple[SavedTensor, ...]
    files: tuple[FileRecord, ...]
    pieces: tuple[PieceRecord, ...]


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete checkpoint. view: the number of the view whose ranks wrote it; 0: one process by itself."""

    format: str
    version: int
    step: int
    view: int
    world_size: int
    metadata: dict[str, str]
    tensors: tuple[SavedTensor, ...]
    files: tuple[FileRecord, ...]
    pieces: tuple[PieceRecord, ...]

    def find(self, name: str, node: str = "") -> int:
        """Return the number of a tensor. Raises LocalError where there is none of that name."""
        for number, tensor in enumerate(self.tensors):
            if (tensor.name, tensor.node) == (name, node):
                return number
        own = f" of the node {node!r}" if node else ""
        raise LocalError(f"the checkpoint of step {self.step} has no tensor {name!r}{own}")

    def region(
        self, name: str, *, offset: Sequence[int] | None, shape: Sequence[int] | None, node: str
    ) -> tuple[int, Region]:
        """Return the number of a tensor, and a region of it.

        Args:
            name: The tensor's.
            offset: The region's first index; None takes the tensor's.
            shape: The region's shape; None takes all from `offset` on.
            node: Whose own tensor it is; "" for one that belongs to all.
        Raises:
            LocalError: There is no such tensor or region.
        """
        number = self.find(name, node)
        whole = self.tensors[number].shape
        begin = (0,) * len(whole) if offset is None else tuple(map(int, offset))
        if shape is None:
            lengths = tuple(total - first for total, first in zip(whole, begin, strict=False))
        else:
            lengths = tuple(map(int, shape))
        wanted = Region(begin, lengths)
        wanted.check(whole, f"tensor {name!r} of the checkpoint of step {self.step}")
        return number, wanted

    def whole(self, node: str) -> dict[str, tuple[int, Region]]:
        """Return what `region` does for all tensors that belong to all, and what is a node's own, by name.

        Args:
            node: Whose own; "" for nobody's. Its name wins where both have one.
        """
        owners = ("", node) if node else ("",)
        return {
            tensor.name: (number, tensor.region)
            for owner in owners
            for number, tensor in enumerate(self.tensors)
            if tensor.node == owner
        }


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seal: str
    content: msgspec.Raw


class _Told(msgspec.Struct, frozen=True):
    """What all versions have."""

    format: str
    version: int


_version_decoder = msgspec.json.Decoder(_Told)
_sealed_decoder = msgspec.json.Decoder(_Sealed)
_decoder = msgspec.json.Decoder(CheckpointManifest)
_share_decoder = msgspec.msgpack.Decoder(RankShare)


def digest_of(data: bytes | memoryview) -> str:
    """Return SHA-256 (FIPS 180-4) in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def metadata_digest(metadata: Mapping[str, str]) -> str:
    """Return a digest of the user's metadata, which ranks compare instead of it."""
    return digest_of(msgspec.json.encode(dict(metadata), order="sorted"))


def encoded(manifest: CheckpointManifest) -> bytes:
    """Return the bytes of a manifest's file: the same for the same manifest."""
    content = msgspec.json.encode(manifest, order="sorted")
    return b'{"seal":"%s",\n"content":%s}\n' % (digest_of(content).encode(), content)


def decoded(data: bytes) -> CheckpointManifest:
    """Read a manifest.

    Raises:
        CheckpointError: It is damaged, is none, or is of another version.
    """
    try:
        sealed = _sealed_decoder.decode(data)
        content = bytes(sealed.content)
        if digest_of(content) != sealed.seal:
            raise CheckpointError(_unsealed(content))
        manifest = _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"not a manifest of quicoll in version {VERSION}, or a damaged one: {error}") from error
    if encoded(manifest) != data:  # what stands between the fields is not sealed
        raise CheckpointError("the manifest is damaged: it is not as it was written")
    _check(manifest)
    return manifest


def _unsealed(content: bytes) -> str:
    """Say why the seal is not that of this content. Another version may be sealed in another way."""
    try:
        told = _version_decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "the manifest is damaged: it is not what was sealed"
    if told.format != FORMAT or told.version == VERSION:
        return "the manifest is damaged: it is not what was sealed"
    return (
        f"the manifest is in version {told.version} of the format, or damaged; this quicoll reads version {VERSION}"
        " alone: load what is in another one with the quicoll that wrote it, and save it with this one"
    )


def encoded_share(share: RankShare) -> bytes:
    """Return what one rank tells the others."""
    return msgspec.msgpack.encode(share)


def decoded_share(data: bytes) -> RankShare:
    """Read what another rank has told.

    Raises:
        CheckpointError: It is malformed.
    """
    try:
        return _share_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"a rank told something that is no share of a checkpoint: {error}") from error


def merged(shares: Sequence[RankShare], *, step: int, view: int, metadata: Mapping[str, str]) -> CheckpointManifest:
    """Make the manifest of what all ranks have written.

    Args:
        shares: By rank.
        step: The step whose state it is.
        view: The number of the ranks' view.
        metadata: The user's; what the caller's own share has the digest of.
    Raises:
        CheckpointError: Ranks hold a tensor of one name with other types or shapes, or nobody has written a part of
            one, or two have written it with different bits. Names the tensor.
    """
    found: dict[tuple[str, str], tuple[SavedTensor, RankShare]] = {}
    for share in shares:
        if share.metadata != shares[0].metadata:
            raise CheckpointError(
                f"{share.node} has other metadata, or another structure of its state, than {shares[0].node}"
            )
        for tensor in share.tensors:
            key = tensor.node, tensor.name
            known, by = found.setdefault(key, (tensor, share))
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"tensor {tensor.name!r} is {known.dtype} {known.shape} on {by.node}"
                    f" and {tensor.dtype} {tensor.shape} on {share.node}"
                )
    keys = sorted(found)
    numbers = {key: number for number, key in enumerate(keys)}
    files: list[FileRecord] = []
    pieces: list[PieceRecord] = []
    for share in shares:
        first = len(files)
        files += share.files
        for piece in share.pieces:
            try:
                tensor = share.tensors[piece.tensor]
            except IndexError as error:
                raise CheckpointError(f"{share.node} told of a piece of no tensor") from error
            number = numbers[tensor.node, tensor.name]
            pieces.append(msgspec.structs.replace(piece, tensor=number, file=first + piece.file))
    _check_copies(pieces, [key[1] for key in keys], files)
    manifest = CheckpointManifest(
        format=FORMAT,
        version=VERSION,
        step=step,
        view=view,
        world_size=len(shares),
        metadata=dict(metadata),
        tensors=tuple(found[key][0] for key in keys),
        files=tuple(files),
        pieces=tuple(sorted(pieces, key=lambda piece: (piece.tensor, piece.offset, piece.file, piece.at))),
    )
    _check(manifest)
    return manifest


def _check_copies(pieces: Sequence[PieceRecord], names: Sequence[str], files: Sequence[FileRecord]) -> None:
    """Raise CheckpointError where two ranks have written one region of a tensor with different bits."""
    first: dict[tuple[int, Region], PieceRecord] = {}
    for piece in pieces:
        other = first.setdefault((piece.tensor, piece.region), piece)
        if other.digest != piece.digest:
            raise CheckpointError(
                f"{piece.region} of tensor {names[piece.tensor]!r} has other bits on {files[piece.file].node} than on"
                f" {files[other.file].node}"
            )


def _check(manifest: CheckpointManifest) -> None:
    """Raise CheckpointError unless the invariants at the module's head hold."""
    _demand(manifest.format == FORMAT, f"its format is {manifest.format!r}, not {FORMAT!r}")
    _demand(manifest.version == VERSION, f"it has version {manifest.version}; this quicoll reads {VERSION}")
    _demand(manifest.step >= 0 and manifest.world_size >= 1, "its step or world size is none")
    for tensor in manifest.tensors:
        sizes = all(0 <= length < _MAX_LENGTH for length in tensor.shape)
        _demand(sizes and len(tensor.shape) <= _MAX_DIMENSIONS, f"tensor {tensor.name!r} has shape {tensor.shape}")
        _width(tensor)
    names = [(tensor.node, tensor.name) for tensor in manifest.tensors]
    _demand(len(dict.fromkeys(names)) == len(names), "two tensors have one name")
    for file in manifest.files:
        match = DATA.fullmatch(file.name)
        _demand(match is not None and int(match[1]) == manifest.step, f"{file.name!r} is no data file of its step")
        _demand(0 < file.begin <= file.nbytes, f"{file.name!r} has no header")
    by_file: list[list[PieceRecord]] = [[] for _ in manifest.files]
    by_tensor: list[list[Region]] = [[] for _ in manifest.tensors]
    for piece in manifest.pieces:
        known = 0 <= piece.tensor < len(manifest.tensors) and 0 <= piece.file < len(manifest.files)
        _demand(known, "a piece is of no tensor, or in no file")
        tensor = manifest.tensors[piece.tensor]
        try:
            piece.region.check(tensor.shape, f"tensor {tensor.name!r}")
        except LocalError as error:
            raise CheckpointError(f"the manifest contradicts itself: {error.message}") from error
        size = math.prod(piece.shape) * _width(tensor)
        _demand(size == piece.nbytes > 0, f"a piece of {tensor.name!r} has {piece.nbytes} bytes, not {size}")
        by_file[piece.file].append(piece)
        by_tensor[piece.tensor].append(piece.region)
    for file, held in zip(manifest.files, by_file, strict=True):
        _check_layout(file, sorted(held, key=lambda piece: piece.at))
    for tensor, regions in zip(manifest.tensors, by_tensor, strict=True):
        gap = uncovered(tensor.region, regions)
        _demand(gap is None, f"nobody has written {gap} of tensor {tensor.name!r}, shape {tensor.shape}")


def _check_layout(file: FileRecord, pieces: Sequence[PieceRecord]) -> None:
    ends = [file.begin, *(piece.at + piece.nbytes for piece in pieces)]
    begins = [*(piece.at for piece in pieces), file.nbytes]
    fits = all(end <= begin for end, begin in zip(ends, begins, strict=True))
    _demand(fits and all(a <= b for a, b in pairwise(begins)), f"pieces of {file.name!r} overlap or go beyond it")


def _width(tensor: SavedTensor) -> int:
    try:
        return width_of(tensor.dtype)
    except LocalError as error:
        raise CheckpointError(f"tensor {tensor.name!r}: {error.message}") from error


def _demand(holds: bool, text: Any) -> None:
    if not holds:
        raise CheckpointError(f"the manifest contradicts itself, or is of another quicoll: {text}")
