"""What a data set holds, in one line that ranks can compare before they train: its length, and a digest of samples.

All ranks have to have the same data set. One that has another trains on it without a word: the results of all are
equal, and they are those of no run on one rank. So what lies in memory is compared at the start.

Only what can be read without running the program's code is read: tensors and arrays, TensorDataset, Subset and
ConcatDataset of torch's, lists and tuples, of which the samples are tensors, arrays, numbers, texts, or lists, tuples
and dictionaries of these. A data set of the program's own class may draw random numbers, or open a file that its
loader's processes are to open: it is not read, and its length alone is compared (quicoll.data.sampler).

Cost: columns of up to WHOLE bytes together are digested as they are, of longer ones SAMPLES samples, evenly spread, and
of each tensor in them the first PART bytes: about a millisecond.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from quicoll.data.feed import Feed

__all__ = ["contents_of"]

WHOLE = 1 << 20
SAMPLES = 64
PART = 16 << 10


class _Unreadable(Exception):
    """Something in it is of the program's own."""


def contents_of(data: Any) -> str | None:
    """Describe a data set: equal on two ranks whose data sets are, and different where a sample that is read differs.

    Args:
        data: A data set, or a feed, of whose loader the data set is taken.
    Returns:
        A text for people; None where it cannot be read.
    """
    if isinstance(data, Feed):
        data = getattr(data.loader, "dataset", None)
    total = blake2b(digest_size=8)
    try:
        columns = _columns(data)
        if columns and sum(each.nbytes for each in columns) <= WHOLE:
            for column in columns:
                _add(total, column, WHOLE)
        else:
            last, count = len(data) - 1, min(len(data), SAMPLES)
            for number in range(count):
                _add(total, _sample(data, number * last // max(count - 1, 1)), PART)
    except (_Unreadable, TypeError, IndexError):
        return None
    return f"{len(data)} samples, digest {total.hexdigest()}"


def _columns(data: Any) -> tuple[Any, ...]:
    if type(data) is TensorDataset:
        return tuple(data.tensors)
    return (data,) if type(data) in (torch.Tensor, np.ndarray) else ()


def _sample(data: Any, index: int) -> Any:
    """A sample, without a call of what is the program's. A class derived from one of these may have its own way."""
    if type(data) in (torch.Tensor, np.ndarray, list, tuple):
        return data[index]
    if type(data) is TensorDataset:
        return tuple(column[index] for column in data.tensors)
    if type(data) is Subset:
        return _sample(data.dataset, int(data.indices[index]))
    if type(data) is ConcatDataset:
        for part in data.datasets:
            length = len(part)  # type: ignore[arg-type] # ConcatDataset has asked for it
            if index < length:
                return _sample(part, index)
            index -= length
    raise _Unreadable


def _add(total: blake2b, value: Any, most: int) -> None:
    """Add a value, with its type and shape; of a tensor or an array the first so many bytes."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        total.update(f"{value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().reshape(-1)[: most // value.element_size()]
        total.update(flat.cpu().contiguous().view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        total.update(f"{value.dtype.str} {value.shape}".encode())
        total.update(np.ascontiguousarray(value.reshape(-1)[: most // value.itemsize]).view(np.uint8).data)
    elif isinstance(value, list | tuple):
        total.update(f"{len(value)} values".encode())
        for each in value:
            _add(total, each, most)
    elif type(value) is dict and all(isinstance(name, str) for name in value):
        for name in sorted(value):
            total.update(repr(name).encode())
            _add(total, value[name], most)
    elif value is None or type(value) in (bool, int, float, str, bytes):
        total.update(repr(value)[:most].encode(errors="surrogatepass"))
    else:
        raise _Unreadable
