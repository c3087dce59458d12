"""Checkpoints to and from the format of torch.distributed.checkpoint (DCP), where torch is there.

What DCP's format is. A directory with a file `.metadata` and files `__0_0.distcp` and so on. `.metadata` is a pickle:
whoever reads it runs what its writer put there. The tensors lie in torch's zip files; DCP reads them by `torch.load`
with `weights_only=True` where they are tensors, and values that are none (`BytesStorageMetadata`) without it. So:

    export      writes tensors alone. What DCP pickles then is its own description of them
    import_     has torch unpickle `.metadata`, and is refused unless the caller says that the directory is trusted.
                Of values that are no tensors none is loaded: they are named in an error before any of them is read

quicoll itself unpickles nothing. The user's metadata travels as a tensor of uint8 under METADATA.

DCP saves what it is given in one process here; it has its own ways of many. Both functions block, and hold all tensors
in memory.
"""

from __future__ import annotations

import json
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.checkpoint.parts import is_torch
from quicoll.checkpoint.store import save
from quicoll.errors import CheckpointError, LocalError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quicoll.checkpoint.storage import Place
    from quicoll.checkpoint.store import Checkpoint

__all__ = ["METADATA", "export", "import_"]

METADATA = "quicoll.metadata"
"""The name under which the metadata of a checkpoint stands among the tensors of DCP."""


def export(found: Checkpoint, directory: str | os.PathLike[str]) -> None:
    """Write a checkpoint as one of torch.distributed.checkpoint.

    Args:
        found: What is written; numpy arrays become torch tensors.
        directory: Where; made if it is missing. It must be empty.
    Raises:
        LocalError: torch is not installed, or the directory is not empty, or a dtype is not torch's.
        CheckpointError: DCP cannot write it.
    """
    dcp = _dcp()
    import torch

    folder = Path(directory)
    if folder.exists() and any(folder.iterdir()):
        raise LocalError(f"{folder} is not empty: DCP would mix its files with what is there")
    if METADATA in found.tensors:
        raise LocalError(f"a tensor cannot be called {METADATA}: the metadata has that name")
    tensors: dict[str, Any] = {}
    for name, value in found.tensors.items():
        try:
            tensors[name] = value if is_torch(value) else torch.from_numpy(np.array(value, order="C"))
        except TypeError as error:
            raise LocalError(f"tensor {name!r} has no dtype of torch's: {error}") from error
    tensors[METADATA] = torch.from_numpy(np.frombuffer(json.dumps(found.metadata).encode(), np.uint8).copy())
    with _quiet(folder, "write"):
        dcp.save(tensors, checkpoint_id=str(folder), no_dist=True)


def import_(
    source: str | os.PathLike[str], directory: Place, *, step: int, trust_pickle: bool = False, keep: int = 3
) -> str:
    """Write what a checkpoint of torch.distributed.checkpoint holds as one of quicoll.

    Args:
        source: DCP's directory.
        directory: Where quicoll's checkpoints are.
        step: The step of the new one.
        trust_pickle: Whether `source` comes from somebody who may run code here: torch unpickles a file of it.
        keep: As for `quicoll.checkpoint.save`.
    Returns:
        The path of the manifest.
    Raises:
        LocalError: trust_pickle is not True, or torch is not installed, or there are values that are no tensors.
        CheckpointError: DCP cannot read it, or it cannot be written.
    """
    if trust_pickle is not True:
        raise LocalError(
            f"to read {os.fspath(source)} torch unpickles a file of it, which runs what its writer put there: say"
            " trust_pickle=True if that may be"
        )
    dcp = _dcp()
    import torch

    with _quiet(Path(source), "read"):
        described = dcp.FileSystemReader(os.fspath(source)).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {}
    for name, each in described.items():
        if not hasattr(each, "properties"):
            raise LocalError(f"{name!r} in {os.fspath(source)} is no tensor: only tensors are taken")
        tensors[name] = torch.empty(each.size, dtype=each.properties.dtype)
    with _quiet(Path(source), "read"):
        dcp.load(tensors, checkpoint_id=os.fspath(source), no_dist=True)
    notes = {}
    if METADATA in tensors:
        try:
            notes = dict(json.loads(bytes(tensors.pop(METADATA).numpy())))
        except (ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{METADATA} is damaged: {error}", path=os.fspath(source)) from error
    return save(directory, step=step, tensors=tensors, metadata=notes, keep=keep)


def _dcp() -> Any:
    try:
        import torch.distributed.checkpoint as dcp
    except ImportError as error:
        raise LocalError("checkpoints of DCP need torch: pip install quicoll[torch]") from error
    return dcp


@contextmanager
def _quiet(path: Path, what: str) -> Iterator[None]:
    """Turn what DCP raises into our error; it warns that it is used without other processes, as it is meant here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # of many kinds, and of pickle's own
        raise CheckpointError(f"torch cannot {what} it: {type(error).__name__}: {error}", path=str(path)) from error
