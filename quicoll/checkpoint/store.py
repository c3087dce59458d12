"""Checkpoints by one process, and reading those of any number of ranks.

A checkpoint is complete when its manifest (`quicoll.checkpoint.manifest`) is there, which is written last and names
every piece of every tensor in the ranks' data files (`quicoll.checkpoint.datafile`), with digests. A rank by itself
writes one file and the manifest of one rank; the ranks of a job write theirs together (`quicoll.train.Checkpointer`).
Both are read in the same way, at any number of ranks.

Invariants.
1. A manifest `step-00000120.manifest.json` appears only once every byte that it names is on the disk, and appears
   whole: a temporary name in the same directory, fsync, rename (atomic by POSIX), fsync of the directory (without it
   the rename itself may be lost with the power; Pillai et al. 2014, "All File Systems Are Not Created Equal").
2. What loads is exactly what was saved. Each piece, each file's header and the manifest have a digest; a flipped bit
   anywhere in them gives CheckpointError, not a guess.
3. A failed save changes nothing: older checkpoints are pruned only after the new one is complete.

No pickle: loading a checkpoint runs no code of it.

Everything here blocks, for the disk. From asyncio call it in a thread on a snapshot, so that neither the event loop
nor the next step waits, and the next step cannot change what is being written:

    await asyncio.to_thread(checkpoint.save, directory, step=n, tensors=checkpoint.snapshot(tensors))

One writer per directory and time. Memory: saving copies nothing that is contiguous on the CPU in little-endian order;
loading holds at most two pieces (64 MiB each) beside the tensors, and none where these are loaded whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from quicoll.checkpoint.catalogue import complete, manifest_name, no_longer_needed
from quicoll.checkpoint.datafile import PieceReader, check_files, write_share
from quicoll.checkpoint.manifest import MAX_MANIFEST_BYTES, CheckpointManifest, decoded, encoded, merged
from quicoll.checkpoint.parts import bytes_of, is_torch, parts_of
from quicoll.checkpoint.planning import assignment
from quicoll.checkpoint.storage import os_reason, split_place, storage_at
from quicoll.errors import CheckpointError, LocalError

if TYPE_CHECKING:
    from quicoll.checkpoint.disk import Disk
    from quicoll.checkpoint.parts import Array
    from quicoll.checkpoint.storage import Place, Storage

__all__ = [
    "Checkpoint",
    "Stored",
    "check_save",
    "digest",
    "latest",
    "load",
    "newest_of",
    "of_step",
    "prune",
    "save",
    "snapshot",
    "stored",
    "stored_of_step",
    "why_unreadable",
    "write_manifest",
]

_log = logging.getLogger("quicoll.checkpoint")

_RESERVED = "quicoll."

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of one checkpoint.

    Attributes:
        path: Its manifest.
        step: The step that it was saved for.
        tensors: By name; numpy arrays or torch tensors, as they were saved.
        metadata: What the caller gave to `save`.
    """

    path: str
    step: int = field(kw_only=True)
    tensors: dict[str, Array] = field(kw_only=True, repr=False)
    metadata: dict[str, str] = field(kw_only=True)

    @property
    def digest(self) -> str:
        """`digest(tensors)`, computed now: it reads all of them."""
        return digest(self.tensors)


class Stored:
    """A checkpoint that is complete: what it holds, and any part of it, read when it is asked for.

    Attributes:
        path: Its manifest.
        manifest: All that it holds.
    """

    def __init__(self, path: str, manifest: CheckpointManifest, storage: Storage) -> None:
        self.path = path
        self.manifest = manifest
        self._reader = PieceReader(storage, manifest)

    @property
    def step(self) -> int:
        """The step whose state it is."""
        return self.manifest.step

    @property
    def metadata(self) -> dict[str, str]:
        """What was saved beside the tensors."""
        return dict(self.manifest.metadata)

    def shapes(self, node: str = "") -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole tensors by name. node: whose own; "" takes those that belong to all."""
        return {tensor.name: tensor.shape for tensor in self.manifest.tensors if tensor.node == node}

    def read(
        self, name: str, *, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None, node: str = ""
    ) -> Array:
        """Read a tensor, or a region of it: no more of the files than the pieces that it touches.

        Args:
            name: The tensor's.
            offset: The region's first index; None takes the tensor's.
            shape: The region's shape; None takes all from `offset` on.
            node: Whose own tensor it is; "" for one that belongs to all.
        Returns:
            New memory, bit for bit as it was saved.
        Raises:
            LocalError: There is no such tensor or region.
            CheckpointError: What is needed is damaged or missing. Names the file.
        """
        number, wanted = self.manifest.region(name, offset=offset, shape=shape, node=node)
        return self._reader.region(number, wanted)

    def load(self, node: str = "", *, names: Sequence[str] | None = None) -> Checkpoint:
        """Read tensors that belong to all, whole, and what is a node's own.

        Args:
            node: Whose own tensors are read as well; "" reads no node's. Its name wins where both have one.
            names: Which of them are read; None: all.
        Returns:
            The checkpoint.
        Raises:
            CheckpointError: It is damaged, has no tensor of a name, or cannot be represented here. Names the file.
        """
        wanted = self.manifest.whole(node)
        try:
            if names is not None:
                wanted = {name: wanted[name] for name in names}
            values = self._reader.regions(list(wanted.values()))
        except KeyError as error:
            raise CheckpointError(f"it has no tensor {error}", path=self.path) from error
        except LocalError as error:
            raise CheckpointError(error.message, path=self.path) from error
        tensors = dict(zip(wanted, values, strict=True))
        return Checkpoint(self.path, step=self.step, tensors=tensors, metadata=self.metadata)

    def __repr__(self) -> str:
        ranks = self.manifest.world_size
        return f"<Stored step={self.step} tensors={len(self.manifest.tensors)} ranks={ranks} {self.path}>"


def save(
    directory: Place,
    *,
    step: int,
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    keep: int = 3,
    disk: Disk | None = None,
) -> str:
    """Write tensors as the checkpoint of a step, by this process alone; make the directory if it is missing.

    A failed save changes nothing: all earlier checkpoints are as they were.

    Args:
        directory: Where the checkpoints are: a path, or an fsspec URL. One writer at a time.
        step: 0 or more.
        tensors: By name, numpy arrays or torch tensors of any shape, of a dtype that safetensors has. CUDA tensors are
            copied. They must not change until this returns (see `snapshot`).
        metadata: Text by name. Names must not begin with "quicoll.".
        keep: Of the checkpoints up to and including `step` the newest `keep` stay. Newer ones are left alone: they are
            damaged and were skipped, or will be written again.
        disk: Where to write; None: the real disk.
    Returns:
        The path of the manifest.
    Raises:
        LocalError: These arguments can never be saved.
        CheckpointError: The disk is full, not permitted or failing.
    """
    notes = dict(metadata or {})
    check_save(step=step, keep=keep, metadata=notes)
    parts = parts_of(tensors, node="")
    storage = storage_at(directory, disk)
    chosen = assignment(parts, rank=0, world_size=1, divide=False)
    pieces = [(part, region, bytes_of(part, region)) for part, region in chosen]
    share = write_share(storage, step=step, rank=0, node="", parts=parts, pieces=pieces, metadata=notes)
    manifest = merged([share], step=step, view=0, metadata=notes)
    # Where this fails the data stays: a manifest whose rename was not synced may be there all the same, and needs it.
    path = write_manifest(storage, manifest)
    prune(storage, manifest, keep=keep)
    return path


def check_save(*, step: int, keep: int, metadata: Mapping[str, str]) -> None:
    """See that a checkpoint can have these numbers and this metadata.

    Args:
        step: 0 or more.
        keep: 1 or more.
        metadata: Text, under names that do not begin with "quicoll.".
    Raises:
        LocalError: It cannot.
    """
    if not 0 <= step < 1 << 63:
        raise LocalError(f"a checkpoint's step is 0 or more, not {step}")
    if keep < 1:
        raise LocalError(f"keep is 1 or more, not {keep}: the checkpoint just written is always kept")
    for key, value in metadata.items():
        if key.startswith(_RESERVED) or not isinstance(value, str):
            raise LocalError(f"checkpoint metadata {key!r}: keys may not begin with {_RESERVED!r}, values are str")


def write_manifest(storage: Storage, manifest: CheckpointManifest, *, shared: bool = True, node: str = "") -> str:
    """Make a checkpoint complete: write its manifest, once all files that it names are seen to be there.

    Args:
        storage: Where.
        manifest: Of files that are durable.
        shared: Whether all ranks write to the same place; otherwise only this node's files are looked for.
        node: This rank's name.
    Returns:
        The path of the manifest.
    Raises:
        CheckpointError: A file is missing, or the manifest cannot be written. The checkpoint is not complete.
    """
    name = manifest_name(manifest.step)
    check_files(storage, manifest, shared=shared, node=node)
    data = encoded(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"the manifest has {len(data)} bytes; {MAX_MANIFEST_BYTES} can be read")
    try:
        storage.write(name, [data])
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {manifest.step}: {os_reason(error)}", path=storage.path(name)
        ) from error
    return storage.path(name)


def prune(storage: Storage, manifest: CheckpointManifest, *, keep: int) -> None:
    """Take away what is no longer needed. The checkpoint is safe by now: trouble here is only worth a warning.

    Args:
        storage: Where.
        manifest: Of the checkpoint that is complete.
        keep: How many of the newest up to it stay.
    """
    files = [file.name for file in manifest.files]
    try:
        doomed = no_longer_needed(storage.names(), step=manifest.step, keep=keep, files=files)
        storage.remove(doomed.manifests)
        storage.remove(doomed.data)
        storage.clean()
    except OSError as error:
        _log.warning("cannot remove old checkpoints in %s: %s", storage.where, os_reason(error))


def load(path: Place, *, disk: Disk | None = None) -> Checkpoint:
    """Read and check one checkpoint.

    Args:
        path: Its manifest, a path or an fsspec URL.
        disk: Where to read; None: the real disk.
    Returns:
        The checkpoint. Tensors are whole, of the kind that was saved (torch tensors on the CPU), bit for bit, writable.
    Raises:
        CheckpointError: It is missing, damaged, cut short or no checkpoint, or a package that its tensors need is not
            installed. Names the path.
    """
    place, name = split_place(path)
    return _opened(storage_at(place, disk), name).load()


def stored(directory: Place, *, disk: Disk | None = None) -> Iterator[Stored]:
    """Yield the checkpoints that are complete, newest first, without reading their tensors.

    One whose manifest is damaged is skipped with a warning to the logger "quicoll.checkpoint".

    Args:
        directory: Where the checkpoints are: a path, or an fsspec URL.
        disk: Where to read; None: the real disk.
    Yields:
        Each; nothing where the directory is missing or holds none.
    Raises:
        CheckpointError: The directory cannot be read.
    """
    storage = storage_at(directory, disk)
    for step in reversed(_steps(storage)):
        try:
            found = _opened(storage, manifest_name(step), step)
        except CheckpointError as error:
            _log.warning("skipping a checkpoint: %s", error)
            continue
        yield found


def latest(directory: Place, *, disk: Disk | None = None) -> Checkpoint | None:
    """Return the newest checkpoint that is whole.

    A damaged newer one is skipped with a warning to the logger "quicoll.checkpoint".

    Args:
        directory: Where the checkpoints are: a path, or an fsspec URL.
        disk: Where to read; None: the real disk.
    Returns:
        The checkpoint, or None if the directory is missing or holds none.
    Raises:
        CheckpointError: There are checkpoints and none is whole. Starting anew would throw work away: that is for a
            person to decide.
    """
    return newest_of(directory, Stored.load, disk=disk)


def newest_of(directory: Place, read: Callable[[Stored], T], *, disk: Disk | None = None) -> T | None:
    """Return what is read of the newest checkpoint of which it can be read; see `latest`.

    Args:
        directory: Where the checkpoints are: a path, or an fsspec URL.
        read: Reads what is wanted of one.
        disk: Where to read; None: the real disk.
    Returns:
        It, or None if the directory is missing or holds no checkpoint.
    Raises:
        CheckpointError: There are checkpoints, and it can be read of none.
    """
    newest: CheckpointError | None = None
    for found in stored(directory, disk=disk):
        try:
            return read(found)
        except CheckpointError as error:
            newest = newest or error
            _log.warning("skipping a checkpoint: %s", error)
    storage = storage_at(directory, disk)
    steps = _steps(storage)
    if steps:
        why = newest or why_unreadable(storage)
        raise CheckpointError(f"none of the {len(steps)} checkpoints is whole: {why}", path=storage.where)
    return None


def of_step(directory: Place, step: int, *, disk: Disk | None = None) -> Checkpoint:
    """Return the checkpoint of one step, such as the last one of a job that is done (`JobDone.step`).

    Args:
        directory: Where the checkpoints are: a path, or an fsspec URL.
        step: The step that it was saved for.
        disk: Where to read; None: the real disk.
    Returns:
        The checkpoint.
    Raises:
        CheckpointError: There is none of this step, which says of which step the newest is; or it is damaged.
    """
    return stored_of_step(directory, step, disk=disk).load()


def stored_of_step(directory: Place, step: int, *, disk: Disk | None = None) -> Stored:
    """As `of_step`, and read none of its tensors."""
    storage = storage_at(directory, disk)
    try:
        found = complete(storage.names())
    except OSError as error:
        raise CheckpointError(f"no checkpoint of step {step}: {os_reason(error)}", path=storage.where) from error
    if step not in found:
        there = f"the newest is of step {max(found)}" if found else "there is none at all"
        raise CheckpointError(f"no checkpoint of step {step}; {there}", path=storage.where)
    return _opened(storage, manifest_name(step), step)


def digest(tensors: Mapping[str, Array]) -> str:
    """Return a digest of tensors: equal digests mean equal bits.

    -0.0 differs from 0.0, and one NaN from another. A numpy array and a torch tensor of the same content are equal.

    Args:
        tensors: By name.
    Returns:
        BLAKE2b-256 (RFC 7693) in hexadecimal, over names, dtypes, shapes and little-endian bytes in order of name.
    Raises:
        LocalError: A dtype cannot be saved.
    """
    state = hashlib.blake2b(digest_size=32)
    for part in parts_of(tensors, node=""):
        data = bytes_of(part, part.region)
        # Every field is led by its length or closed by the JSON syntax, so no two lists of parts give the same bytes.
        label = json.dumps([part.name, part.code, list(part.shape)]).encode()
        state.update(struct.pack("<QQ", len(label), data.nbytes))
        state.update(label)
        state.update(data)
    return state.hexdigest()


def snapshot(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Copy tensors to memory of their own on the CPU, so that a thread can save them while training goes on.

    Args:
        tensors: By name, numpy arrays or torch tensors.
    Returns:
        The copies, by name, of the same kinds.
    """
    return {
        name: value.detach().to("cpu", copy=True) if is_torch(value) else np.array(value, copy=True)
        for name, value in tensors.items()
    }


def why_unreadable(storage: Storage) -> str:
    """Return why the newest manifest cannot be read; "" where there is none, or it can be.

    Raises:
        CheckpointError: The place cannot be read.
    """
    steps = _steps(storage)
    if steps:
        try:
            _opened(storage, manifest_name(steps[-1]), steps[-1])
        except CheckpointError as error:
            return str(error)
    return ""


def _steps(storage: Storage) -> list[int]:
    try:
        return complete(storage.names())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints: {os_reason(error)}", path=storage.where) from error


def _opened(storage: Storage, name: str, step: int | None = None) -> Stored:
    path = storage.path(name)
    try:
        data = storage.read(name, 0, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint: {os_reason(error)}", path=path) from error
    try:
        manifest = decoded(data)
    except CheckpointError as error:
        raise CheckpointError(error.message, path=path) from error
    if step is not None and manifest.step != step:
        raise CheckpointError(f"it holds step {manifest.step} under the name of {step}", path=path)
    return Stored(path, manifest, storage)
