"""How tests start programs of torch's."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
LOST_AFTER = "15"
"""Seconds of silence until a rank is lost. On a busy machine a process that loads torch's libraries, holding the
interpreter's lock, can be silent for more than the 2 s that are the default; one that is killed is found at once."""


def environment() -> dict[str, str]:
    """This process's, without what a launcher says."""
    others = ("QUICOLL_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    path = os.environ.get("PYTHONPATH") or os.pathsep.join([str(ROOT), str(ROOT / "transport")])
    # Its own directory is none where Python is told to be safe, as for what runs with the compiled modules.
    more = {"PYTHONPATH": os.pathsep.join([path, str(HELPERS)]), "OMP_NUM_THREADS": "1"}
    return {**kept, **more, "QUICOLL_LOST_AFTER": LOST_AFTER}
