"""quicoll's errors as torch programs catch them.

A program that was written for another backend catches RuntimeError, or `torch.distributed.DistBackendError`. What an
operation raises here is both of these and quicoll's own class, with its text and attributes: a PeerError is a PeerError
and a DistBackendError. Each raise makes an object of its own, so that two threads that wait for one operation do not
write to one traceback. Programs send errors to other processes (torch.multiprocessing, torchft), so each can be
pickled, as the classes that it is made of can.

Programs also look for words of torch's in an error, to tell a rank that is late from one that is gone. Those are put
behind what quicoll says (`add_words`), where they are true.
"""

from __future__ import annotations

import re
from typing import Any

from torch.distributed import DistBackendError

from quicoll.errors import LocalError, PeerError, QuicollError

__all__ = ["CLOSED", "add_words", "for_torch", "milliseconds", "refused", "say_as_gloo"]

CLOSED = "Connection closed by peer"
"""What Gloo says of a rank that is gone."""


def for_torch(error: BaseException) -> BaseException:
    """Return an error to raise in a torch program.

    Args:
        error: What was raised below.
    Returns:
        An error of a class that is quicoll's and torch's, if it is one of quicoll's; else the error itself.
    """
    if not isinstance(error, QuicollError) or isinstance(error, SystemExit | DistBackendError):
        return error
    made = _made(type(error), error.args, error.__dict__)
    made.__cause__ = error.__cause__
    return made


def refused(message: str) -> BaseException:
    """Return the error of a call that cannot be made; nothing was sent.

    Args:
        message: What is wrong, and what to do.
    """
    return for_torch(LocalError(message))


def add_words(error: BaseException, words: str) -> None:
    """Put words that torch's programs look for behind what an error says, once.

    Args:
        error: Of quicoll's; one that says nothing stays as it is.
        words: torch's.
    """
    if error.args and words not in str(error.args[0]):
        error.args = (f"{error.args[0]}. {words}", *error.args[1:])


def milliseconds(seconds: float) -> str:
    """Return a time as torch's errors name it, and as programs look for it: "1000ms".

    Args:
        seconds: At least one millisecond is said.
    """
    return f"{max(round(seconds * 1000), 1)}ms"


def say_as_gloo(error: PeerError, *, rank: int, within: float, every: bool) -> None:
    """Put in front of what an error says Gloo's words for a monitored barrier that failed.

    Args:
        error: Of the barrier.
        rank: Of this process. Rank 0 names those who have not come.
        within: Seconds that they had.
        every: Whether all of them are named, or the first.
    """
    if rank:
        said = f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv"
        said += " from rank 0"
    else:
        said = "Rank 0 timed out in monitoredBarrier"
        absent, late, _ = error.message.partition(" did not call ")
        missing = re.findall(r"rank (\d+) \(", absent) if late else []
        if missing:
            named = f"Ranks {', '.join(missing)}" if every and len(missing) > 1 else f"Rank {missing[0]}"
            said += f": {named} failed to pass monitoredBarrier in {milliseconds(within)}"
    error.args = (f"{said}: {error.args[0]}", *error.args[1:])


_twins: dict[type[QuicollError], type[QuicollError]] = {}


def _twin(kind: type[QuicollError]) -> type[QuicollError]:
    """The class of the same name that is torch's too."""
    if kind not in _twins:

        def reduce(self: QuicollError) -> tuple[Any, ...]:
            return _made, (kind, self.args, self.__dict__)

        body = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduce}
        _twins[kind] = type(kind.__name__, (kind, DistBackendError), body)
    return _twins[kind]


def _made(kind: type[QuicollError], args: tuple[Any, ...], attributes: dict[str, Any]) -> QuicollError:
    twin = _twin(kind)
    made = twin.__new__(twin, *args)
    made.args = args
    made.__dict__.update(attributes)
    return made
