"""Tensors on other devices, by way of the host.

A group works on memory of the host. What an operation reads on another device is copied to the host when it is issued,
and what it gives is copied to the device by whoever hands the result over (`work`).

The device has streams, on which work goes on behind the program's back. Nothing here takes part in that:

- Before something is copied to the host, all that the device was asked for is waited for, whichever stream it is on. So
  what comes is what the program has computed, and nothing under way still reads a tensor that a result will go to.
- After something is copied to the device, the same again. So who has waited for an operation may use its result on any
  stream, and no stream has to wait for another one's event.

That costs the overlap of the device's work with the copies, not with the network: between the call and the result the
device computes on. A device counts that has a module in torch (`torch.cuda` for "cuda") which can wait for it; every
other one ("meta" has no memory) is refused. Failure cases: LocalError, with what torch says; nothing was sent where a
tensor cannot be read, and where one cannot be written the others have their results.

Work that hands tensors of a device on in a future has to name the device to torch, which synchronises streams there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quicoll.torch_backend.failures import refused

__all__ = ["future_of", "read_device", "write_device"]

_HOST = "cpu"


def read_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host of a tensor that is elsewhere.

    Args:
        tensor: On a device that is not the host.
    Raises:
        LocalError: It cannot be read.
    """
    module = _module(tensor.device)
    try:
        module.synchronize(tensor.device)
        return tensor.data.cpu()
    except RuntimeError as error:
        raise refused(f"a tensor on device {tensor.device} cannot be read: {_first_line(error)}") from error


def write_device(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Write a result of the host's into a tensor that is elsewhere. When this returns it is there.

    Args:
        tensor: On a device that is not the host.
        result: Of its shape and type.
    Raises:
        LocalError: It cannot be written.
    """
    module = _module(tensor.device)
    try:
        tensor.data.copy_(result)
        module.synchronize(tensor.device)
    except RuntimeError as error:
        raise refused(f"a result cannot be written to device {tensor.device}: {_first_line(error)}") from error


def future_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Return torch's future that may have these tensors as its value.

    Args:
        tensors: On any devices.
    """
    devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type != _HOST)
    return torch.futures.Future(devices=list(devices)) if devices else torch.futures.Future()


def _module(device: torch.device) -> Any:
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        module = None
    if not hasattr(module, "synchronize"):
        raise refused(
            f"a tensor on device {device}: the backend quicoll takes tensors of the CPU, and copies those of devices "
            "that torch can wait for, as CUDA's; pass tensor.cpu() and copy the result back"
        )
    return module


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
