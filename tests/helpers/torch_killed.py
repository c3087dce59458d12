"""Run examples/torchrun_ddp.py; rank 1 is killed as it begins step 3, the first time.

torch_killed.py DIRECTORY
"""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path

from quicoll.torch import CanonicalHook

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_ddp.py"

_shards = CanonicalHook.shards


def shards(hook: CanonicalHook, step: int) -> Iterator[int]:
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], step) == ("0", "1", 3):
        os.kill(os.getpid(), signal.SIGKILL)
    return _shards(hook, step)


if __name__ == "__main__":
    CanonicalHook.shards = shards
    runpy.run_path(str(EXAMPLE), run_name="__main__")
