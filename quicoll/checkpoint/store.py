"""Checkpoints that are either whole or not there: safetensors files with a digest, written by rename.

Invariants.
1. A name `step-00000120.safetensors` appears only once every byte behind it is on the disk: the bytes go to a
   temporary name in the same directory, then fsync, rename (atomic by POSIX), fsync of the directory (without it the
   rename itself may be lost with the power; Pillai et al. 2014, "All File Systems Are Not Created Equal").
2. A file that loads holds exactly what was saved. The digest covers names, dtypes, shapes and bytes of all tensors, a
   second one covers the step, the metadata and the first; a flipped bit anywhere gives CheckpointError, not a guess.
3. A failed save changes nothing: older files are pruned only after the new one is in place, and the temporary file
   is taken away.

No pickle: loading a file runs no code of it. The header is written here and not by the safetensors package, whose
0.8 interface takes raw addresses and leaves no place for fsync before the rename; reading goes through the package,
which checks the layout (offsets within the file, no holes, no overlap).

Everything here blocks, for the disk. From asyncio call it in a thread on a snapshot, so that neither the event loop
nor the next step waits, and the next step cannot change what is being written:

    await asyncio.to_thread(checkpoint.save, directory, step=n, tensors=checkpoint.snapshot(tensors))

One writer per directory and time. Memory: saving copies nothing that is contiguous on the CPU in little-endian order;
loading holds the file twice for a moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import safetensors

from quicoll.checkpoint.disk import Disk, OsDisk
from quicoll.errors import CheckpointError, LocalError

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

    Array: TypeAlias = np.ndarray[Any, Any] | torch.Tensor

__all__ = ["Checkpoint", "digest", "latest", "load", "of_step", "save", "snapshot"]

_log = logging.getLogger("quicoll.checkpoint")

_OS_DISK = OsDisk()
_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_TEMPORARY = re.compile(r"\.step-.*\.tmp")
_RESERVED = "quicoll."
_FORMAT = "1"
_STALE_AFTER_S = 3600.0
"""Age in seconds after which a temporary file is taken for one whose writer was killed."""

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES = {code: name for name, code in _CODES.items()}
_EXTENSION_DTYPES = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
"""Those that numpy has only through ml_dtypes."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of one checkpoint file.

    Attributes:
        path: The file.
        step: The step that it was saved for.
        tensors: By name; numpy arrays or torch tensors, as they were saved.
        metadata: What the caller gave to `save`.
        digest: `digest(tensors)`, already checked.
    """

    path: Path
    step: int = field(kw_only=True)
    tensors: dict[str, Array] = field(kw_only=True, repr=False)
    metadata: dict[str, str] = field(kw_only=True)
    digest: str = field(kw_only=True)


def save(
    directory: str | os.PathLike[str],
    *,
    step: int,
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    keep: int = 3,
    disk: Disk | None = None,
) -> Path:
    """Write tensors as the checkpoint of a step; make the directory if it is missing.

    A failed save changes nothing: all earlier checkpoints are as they were.

    Args:
        directory: Where the checkpoints are. One writer at a time.
        step: 0 or more.
        tensors: By name, numpy arrays or torch tensors of any shape, of a dtype that safetensors has. CUDA tensors are
            copied. They must not change until this returns (see `snapshot`).
        metadata: Text by name. Names must not begin with "quicoll.".
        keep: Of the checkpoints up to and including `step` the newest `keep` stay. Newer ones are left alone: they are
            damaged and were skipped, or will be written again.
        disk: Where to write; None: the real disk.
    Returns:
        The path of the new file.
    Raises:
        LocalError: These arguments can never be saved.
        CheckpointError: The disk is full, not permitted or failing.
    """
    if step < 0:
        raise LocalError(f"a checkpoint's step is 0 or more, not {step}")
    if keep < 1:
        raise LocalError(f"keep is 1 or more, not {keep}: the checkpoint just written is always kept")
    notes = dict(metadata or {})
    for key, value in notes.items():
        if key.startswith(_RESERVED) or not isinstance(value, str):
            raise LocalError(f"checkpoint metadata {key!r}: keys may not begin with {_RESERVED!r}, values are str")
    parts = _parts(tensors)
    header = _header(parts, step=step, notes=notes)
    folder = Path(directory)
    target = folder / f"step-{step:08d}.safetensors"
    disk = disk or _OS_DISK
    temporary = folder / f".{target.name}.{disk.token()}.tmp"
    try:
        _make_folder(disk, folder)
        try:
            disk.create(temporary, [header, *(part.data for part in _by_alignment(parts))])
            disk.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.remove(temporary)
            raise
        disk.sync_directory(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {step}: {_reason(error)}", path=str(target)
        ) from error
    _prune(disk, folder, step=step, keep=keep)
    return target


def load(path: str | os.PathLike[str], *, disk: Disk | None = None) -> Checkpoint:
    """Read and check one checkpoint file.

    Args:
        path: The file.
        disk: Where to read; None: the real disk.
    Returns:
        The checkpoint. Tensors are of the kind that was saved (torch tensors on the CPU), bit for bit, writable.
    Raises:
        CheckpointError: The file is missing, damaged, cut short or no checkpoint, or a package that its tensors need is
            not installed. Names the path.
    """
    where = Path(path)
    try:
        data = (disk or _OS_DISK).read(where)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint: {_reason(error)}", path=str(where)) from error
    try:
        # Structure first, by the package; only then is the header, now known to be bounded and sane, read once more
        # for the metadata, which deserialize() does not return.
        entries = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # it has none
        (size,) = struct.unpack_from("<Q", data)
        notes = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    except (safetensors.SafetensorError, ValueError, struct.error) as error:
        raise CheckpointError(f"the checkpoint is damaged or is none: {error}", path=str(where)) from error
    if notes.get("quicoll.format") != _FORMAT:
        found = notes.get("quicoll.format", "no format mark")
        raise CheckpointError(f"not a checkpoint of quicoll in format {_FORMAT}: {found}", path=str(where))
    try:
        step = int(notes["quicoll.step"])
        of_torch = frozenset(cast("list[str]", json.loads(notes["quicoll.torch"])))
        claimed, seal = notes["quicoll.digest"], notes["quicoll.seal"]
        parts = [
            _Part(name, entry["dtype"], tuple(entry["shape"]), memoryview(entry["data"]), name in of_torch)
            for name, entry in sorted(entries)
        ]
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"the checkpoint's header is damaged: {error!r}", path=str(where)) from error
    user_notes = {key: value for key, value in notes.items() if not key.startswith(_RESERVED)}
    actual = _digest(parts)
    if actual != claimed:
        raise CheckpointError(f"the tensors are damaged: digest {actual}, saved with {claimed}", path=str(where))
    if _seal(parts, step=step, notes=user_notes, tensors_digest=actual) != seal:
        raise CheckpointError("the checkpoint's step or metadata is damaged", path=str(where))
    try:
        tensors = {part.name: part.to_array() for part in parts}
    except (ImportError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"the checkpoint cannot be represented here: {error!r}", path=str(where)) from error
    return Checkpoint(where, step=step, tensors=tensors, metadata=user_notes, digest=actual)


def latest(directory: str | os.PathLike[str], *, disk: Disk | None = None) -> Checkpoint | None:
    """Return the newest checkpoint that is whole.

    A damaged newer one is skipped with a warning to the logger "quicoll.checkpoint".

    Args:
        directory: Where the checkpoints are.
        disk: Where to read; None: the real disk.
    Returns:
        The checkpoint, or None if the directory is missing or holds none.
    Raises:
        CheckpointError: There are checkpoints and none is whole. Starting anew would throw work away: that is for a
            person to decide.
    """
    disk = disk or _OS_DISK
    folder = Path(directory)
    try:
        found = _steps(disk, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints: {_reason(error)}", path=str(folder)) from error
    for step, path in reversed(found):
        try:
            checkpoint = load(path, disk=disk)
        except CheckpointError as error:
            _log.warning("skipping a checkpoint: %s", error)
            continue
        if checkpoint.step == step:
            return checkpoint
        _log.warning("skipping a checkpoint: it holds step %d under the name of another: %s", checkpoint.step, path)
    if found:
        raise CheckpointError(f"none of the {len(found)} checkpoints is whole", path=str(folder))
    return None


def of_step(directory: str | os.PathLike[str], step: int, *, disk: Disk | None = None) -> Checkpoint:
    """Return the checkpoint of one step, such as the last one of a job that is done (`JobDone.step`).

    Args:
        directory: Where the checkpoints are.
        step: The step that it was saved for.
        disk: Where to read; None: the real disk.
    Returns:
        The checkpoint.
    Raises:
        CheckpointError: There is none of this step, which says of which step the newest is; or it is damaged.
    """
    disk = disk or _OS_DISK
    folder = Path(directory)
    try:
        found = dict(_steps(disk, folder))
    except OSError as error:
        raise CheckpointError(f"no checkpoint of step {step}: {_reason(error)}", path=str(folder)) from error
    if step not in found:
        there = f"the newest is of step {max(found)}" if found else "there is none at all"
        raise CheckpointError(f"no checkpoint of step {step}; {there}", path=str(folder))
    checkpoint = load(found[step], disk=disk)
    if checkpoint.step != step:
        raise CheckpointError(f"it holds step {checkpoint.step} under the name of {step}", path=str(found[step]))
    return checkpoint


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
    return _digest(_parts(tensors))


def snapshot(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Copy tensors to memory of their own on the CPU, so that a thread can save them while training goes on.

    Args:
        tensors: By name, numpy arrays or torch tensors.
    Returns:
        The copies, by name, of the same kinds.
    """
    return {
        name: value.detach().to("cpu", copy=True) if _is_torch(value) else np.array(value, copy=True)
        for name, value in tensors.items()
    }


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor as the file holds it: safetensors' dtype code, shape, little-endian C-order bytes."""

    name: str
    code: str
    shape: tuple[int, ...]
    data: memoryview
    of_torch: bool

    def to_array(self) -> Array:
        name = _DTYPES[self.code]
        if self.of_torch:
            import torch

            dtype = getattr(torch, name)
            if not self.data.nbytes:
                return torch.empty(self.shape, dtype=dtype)
            return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(dtype).reshape(self.shape)
        if name in _EXTENSION_DTYPES:
            import ml_dtypes

            numpy_dtype = np.dtype(getattr(ml_dtypes, name))
        else:
            numpy_dtype = np.dtype(name)
        return np.frombuffer(bytearray(self.data), dtype=numpy_dtype.newbyteorder("<")).reshape(self.shape)


def _parts(tensors: Mapping[str, Array]) -> list[_Part]:
    return [_part(name, tensors[name]) for name in sorted(tensors)]


def _part(name: str, value: Array) -> _Part:
    if name == "__metadata__":
        raise LocalError("a tensor cannot be called __metadata__: safetensors keeps that name for itself")
    if _is_torch(value):
        import torch

        if value.layout is not torch.strided or value.device.type == "meta":
            raise LocalError(
                f"tensor {name!r} is {value.layout} on {value.device}; only dense ones with data are saved"
            )
        code = _code(name, str(value.dtype).removeprefix("torch."))
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _Part(name, code, tuple(value.shape), flat.data, True)
    array = np.asarray(value)
    code = _code(name, array.dtype.name)
    if sys.byteorder == "big" or array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _Part(name, code, tuple(array.shape), flat.data, False)


def _code(name: str, dtype: str) -> str:
    if dtype not in _CODES:
        raise LocalError(f"tensor {name!r} has dtype {dtype}, which a checkpoint cannot hold")
    return _CODES[dtype]


def _is_torch(value: object) -> TypeIs[torch.Tensor]:
    """Return whether it is a torch tensor, without importing torch for those who do not use it."""
    loaded = sys.modules.get("torch")
    return loaded is not None and isinstance(value, loaded.Tensor)


def _digest(parts: Iterable[_Part]) -> str:
    state = hashlib.blake2b(digest_size=32)
    for part in parts:
        # Every field is led by its length or closed by the JSON syntax, so no two lists of parts give the same bytes.
        label = json.dumps([part.name, part.code, list(part.shape)]).encode()
        state.update(struct.pack("<QQ", len(label), part.data.nbytes))
        state.update(label)
        state.update(part.data)
    return state.hexdigest()


def _seal(parts: Iterable[_Part], *, step: int, notes: Mapping[str, str], tensors_digest: str) -> str:
    """Digest over what the tensors' digest leaves out: the step, the user's metadata, which tensors were torch's."""
    kinds = [part.name for part in parts if part.of_torch]
    content = json.dumps([_FORMAT, step, sorted(notes.items()), kinds, tensors_digest])
    return hashlib.blake2b(content.encode(), digest_size=32).hexdigest()


def _header(parts: list[_Part], *, step: int, notes: Mapping[str, str]) -> bytes:
    tensors_digest = _digest(parts)
    header: dict[str, object] = {
        "__metadata__": {
            **notes,
            "quicoll.format": _FORMAT,
            "quicoll.step": str(step),
            "quicoll.torch": json.dumps([part.name for part in parts if part.of_torch]),
            "quicoll.digest": tensors_digest,
            "quicoll.seal": _seal(parts, step=step, notes=notes, tensors_digest=tensors_digest),
        }
    }
    offset = 0
    for part in _by_alignment(parts):
        header[part.name] = {
            "dtype": part.code,
            "shape": list(part.shape),
            "data_offsets": [offset, offset + part.data.nbytes],
        }
        offset += part.data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for tensor data that begins at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


def _by_alignment(parts: list[_Part]) -> list[_Part]:
    """Wide elements first, as the safetensors package writes: then every tensor is aligned for readers that map it."""
    return sorted(parts, key=lambda part: -_width(part))


def _width(part: _Part) -> int:
    if part.code == "BOOL" or part.code.startswith("F8"):
        return 8
    return int(part.code.lstrip("BFIU"))


def _make_folder(disk: Disk, folder: Path) -> None:
    """Make the folder and what is missing above it, durably: a checkpoint in a directory that is lost is lost.

    A directory that is there may have been made by a process that was killed before it could sync; so the name of one
    that is found is synced too. None of ours has a child before its own name is synced, so no more than one is behind.
    """
    try:
        disk.make_directory(folder)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if folder.parent == folder:  # the working directory itself was removed
            raise
        _make_folder(disk, folder.parent)
        disk.make_directory(folder)
    else:
        _sync_name(disk, folder.parent)
    _sync_name(disk, folder)


def _sync_name(disk: Disk, folder: Path) -> None:
    # A directory that may be passed through but not read cannot be opened for fsync; then its owner made it, not we.
    with contextlib.suppress(PermissionError):
        disk.sync_directory(folder.parent)


def _steps(disk: Disk, folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in the folder by name, oldest first."""
    found = ((_NAME.fullmatch(name), name) for name in disk.names(folder))
    return sorted((int(match[1]), folder / name) for match, name in found if match)


def _prune(disk: Disk, folder: Path, *, step: int, keep: int) -> None:
    """Take away what is no longer needed. The new checkpoint is safe by now: trouble here is only worth a warning."""
    try:
        old = [path for number, path in _steps(disk, folder) if number <= step][:-keep]
        temporary = [folder / name for name in disk.names(folder) if _TEMPORARY.fullmatch(name)]
        for path in [*old, *(path for path in temporary if disk.age_s(path) > _STALE_AFTER_S)]:
            with contextlib.suppress(FileNotFoundError):
                disk.remove(path)
    except OSError as error:
        _log.warning("cannot remove old checkpoints in %s: %s", folder, _reason(error))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
