"""A process whose clocks are wrong, from its first moment: Python imports this where the directory is in PYTHONPATH.

QUICOLL_TEST_CLOCK is "SECONDS RATE": so much later is the time of day, and so much faster all clocks go.
"""

from __future__ import annotations

import os
import time

_shift, _rate = (float(word) for word in os.environ["QUICOLL_TEST_CLOCK"].split())
_time, _monotonic = time.time_ns, time.monotonic_ns
_began, _began_monotonic = _time(), _monotonic()


def time_ns() -> int:
    return round(_began + _shift * 1e9 + (_time() - _began) * _rate)


def monotonic_ns() -> int:
    return round(_began_monotonic + (_monotonic() - _began_monotonic) * _rate)


# A replacement by name: who imports the module's functions later gets these (asyncio, the transport, the journal).
setattr(time, "time_ns", time_ns)  # noqa: B010 - the type checker knows the module's functions as constants
setattr(time, "time", lambda: time_ns() / 1e9)  # noqa: B010 - likewise
setattr(time, "monotonic_ns", monotonic_ns)  # noqa: B010 - likewise
setattr(time, "monotonic", lambda: monotonic_ns() / 1e9)  # noqa: B010 - likewise
