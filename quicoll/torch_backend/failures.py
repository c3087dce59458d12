"""quicoll's errors as torch programs catch them.

A program that was written for another backend catches RuntimeError, or `torch.distributed.DistBackendError`. What an
operation raises here is both of these and quicoll's own class, with its text and attributes: a PeerError is a PeerError
and a DistBackendError. Each raise makes an object of its own, so that two threads that wait for one operation do not
write to one traceback.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from quicoll.errors import LocalError, QuicollError

__all__ = ["for_torch", "refused"]


def for_torch(error: BaseException) -> BaseException:
    """Return an error to raise in a torch program.

    Args:
        error: What was raised below.
    Returns:
        An error of a class that is quicoll's and torch's, if it is one of quicoll's; else the error itself.
    """
    if not isinstance(error, QuicollError) or isinstance(error, SystemExit | DistBackendError):
        return error
    twin = _twin(type(error))
    made = twin.__new__(twin, *error.args)
    made.args = error.args
    made.__dict__.update(error.__dict__)
    made.__cause__ = error.__cause__
    return made


def refused(message: str) -> BaseException:
    """Return the error of a call that cannot be made; nothing was sent.

    Args:
        message: What is wrong, and what to do.
    """
    return for_torch(LocalError(message))


_twins: dict[type[QuicollError], type[QuicollError]] = {}


def _twin(kind: type[QuicollError]) -> type[QuicollError]:
    """The class of the same name that is torch's too."""
    if kind not in _twins:
        body = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _twins[kind] = type(kind.__name__, (kind, DistBackendError), body)
    return _twins[kind]
