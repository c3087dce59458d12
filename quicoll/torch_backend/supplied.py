"""Two of torch's functional operations, supplied: its own go past the group, to a backend below it that is not there.

`_c10d_functional` has an operation for each collective, in C++. All of them call the process group, whose methods are
ours, but for these two, which ask the group for its backend first ("No backend type associated with device type cpu"):

    batch_p2p_ops               sends and receives of one batch: they are issued here one by one, in their order, and
                                none waits for another
    all_gather_into_tensor_out  all_gather into a given tensor, as torch.compile makes them of FSDP2's

Ours take the place of torch's for tensors on the CPU, in all groups of the process, because an operation has one kernel
for a kind of device. A group that is not ours gets torch's, which was asked for before. It is done when the first group
is made; a version of torch that has not one of them, or cannot be asked for its kernel, is left as it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from quicoll.torch_backend.methods import Methods

__all__ = ["supply_operations"]

log = logging.getLogger("quicoll")

_LIBRARY = "_c10d_functional"
_libraries: list[Any] = []  # what is registered ends with its library
_once = threading.Lock()  # threads may make groups at the same time, and each needs the operations when it has its own


def supply_operations() -> None:
    """Put ours in the place of torch's, once for a process."""
    with _once:
        if not _libraries:
            _supply()


def _supply() -> None:
    known: Any = torch.library  # its functions have no types
    library = known.Library(_LIBRARY, "IMPL")
    _libraries.append(library)
    for name, make in (("batch_p2p_ops", _batch_p2p_ops), ("all_gather_into_tensor_out", _all_gather_into_tensor_out)):
        try:
            kernel = known.get_kernel(f"{_LIBRARY}::{name}", "CPU")
            library.impl(name, make(kernel), "CPU", with_keyset=True)
        except (AttributeError, RuntimeError) as error:  # another version of torch's
            log.info("torch's operation %s::%s stays as it is: %s", _LIBRARY, name, error)


def _batch_p2p_ops(kernel: Any) -> Callable[..., Any]:
    def batch_p2p_ops(
        keys: Any,
        kinds: Sequence[str],
        peers: Sequence[int],
        tags: Sequence[int],
        tensors: Sequence[torch.Tensor],
        group_name: Any,
    ) -> list[torch.Tensor]:
        group = _group(group_name)
        if group is None:
            given: list[torch.Tensor] = kernel.call_boxed(keys, kinds, peers, tags, tensors, group_name)
            return given
        results = []
        for kind, peer, tag, tensor in zip(kinds, peers, tags, tensors, strict=True):
            receives = kind == "irecv"
            work = group.recv([tensor], peer, tag) if receives else group.send([tensor], peer, tag)
            result = tensor if receives else tensor.new_empty(0)  # that of a send is there to be waited for
            c10d._register_work(result, work)  # noqa: SLF001 - what torch registers in C++
            results.append(result)
        return results

    return batch_p2p_ops


def _all_gather_into_tensor_out(kernel: Any) -> Callable[..., Any]:
    def all_gather_into_tensor_out(
        keys: Any, given: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
    ) -> torch.Tensor:
        group = _group(group_name)
        if group is None:
            gathered: torch.Tensor = kernel.call_boxed(keys, given, group_size, group_name, out=out)
            return gathered
        c10d._register_work(out, group.all_gather_single(out, given))  # noqa: SLF001 - likewise
        return out

    return all_gather_into_tensor_out


def _group(named: Any) -> Any:
    """The group of this name, or which this is; None where it is not ours."""
    resolve: Any = c10d._resolve_process_group  # noqa: SLF001 - likewise
    group = resolve(named) if isinstance(named, str) else named
    return group if isinstance(group, Methods) else None
