"""A device for tests of tensors that are not on the CPU: "away", torch's place for others' backends, in Python.

Its memory is the host's, but torch does not know that: what is not defined below cannot be done with a tensor there.
What is written to it, when a tensor is made too, is put off until the device is waited for, as where there are streams:
who looks too early finds what was there before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["Away", "put_away"]

_DEVICE = torch.device("privateuseone:0")
_ALIASES = ("as_strided", "view", "_reshape_alias", "set_.source_Storage_storage_offset")


class Away:
    """The module of the device: `torch.away`. broken: what it says to who waits for it, where that fails."""

    def __init__(self) -> None:
        self.broken = ""
        self._lock = threading.Lock()
        self._queue: list[Callable[[], object]] = []
        self._memory: dict[int, Any] = {}
        self.library: Any = None  # what is registered ends with its library

    def synchronize(self, device: Any = None) -> None:
        if self.broken:
            raise RuntimeError(f"{self.broken}\nand more lines of no use")
        with self._lock:
            for work in self._queue:
                work()
            self._queue.clear()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def later(self, work: Callable[[], object]) -> None:
        """Have the device do something when it is waited for."""
        with self._lock:
            self._queue.append(work)

    def made(self, host: Any) -> Any:
        """A tensor on the device with these elements."""
        given = host.detach().contiguous().clone()
        memory = torch.zeros_like(given)
        self.later(lambda: memory.copy_(given))
        storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), _DEVICE, memory.nbytes)
        self._memory[storage._cdata] = memory.reshape(-1)
        tensor = torch._C._acc.create_empty_tensor(tuple(host.shape), host.dtype)
        return tensor.set_(storage, 0, memory.size(), memory.stride())

    def there(self, tensor: Any) -> Any:
        """The memory of a tensor on the device, as a tensor of the host."""
        whole = self._memory[tensor.untyped_storage()._cdata]
        return torch.as_strided(whole, tensor.size(), tensor.stride(), tensor.storage_offset())

    def copy(self, source: Any, target: Any) -> None:
        if source.device.type == "away":  # to the host: what is there now, whether it is ready or not
            target.copy_(self.there(source))
        else:
            given = source.clone()
            self.later(lambda: self.there(target).copy_(given))


def put_away() -> Away:
    """Make the device, once for a process."""
    away = Away()
    _setup_privateuseone_for_python_backend("away", backend_module=away)
    library: Any = torch.library.Library("aten", "IMPL")
    for name in _ALIASES:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")  # it looks at shapes alone
        library.impl(name, _alias(kernel), "PrivateUse1", with_keyset=True)

    def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        away.copy(source, target)
        return target

    library.impl("_copy_from", copy_from, "PrivateUse1")
    away.library = library
    return away


def _alias(kernel: Any) -> Callable[..., Any]:
    def alias(keys: Any, *given: Any, **named: Any) -> Any:
        return kernel.call_boxed(keys, *given, **named)

    return alias
