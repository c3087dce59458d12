"""What `import quicoll` loads, and what it offers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import quicoll

HEAVY = [
    "OpenSSL",
    "aioquic",
    "asyncio",
    "cryptography",
    "logging",
    "msgspec",
    "numpy",
    "quicoll_transport",
    "safetensors",
    "ssl",
    "torch",
    "xxhash",
]
MODULES = ["blocking", "checkpoint", "data", "sim", "testing", "train"]


def in_a_fresh_process(code: str) -> Any:
    """What `code` leaves in `found`."""
    program = f"import json, sys\n{code}\nprint(json.dumps(found))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_package_alone_loads_its_errors_and_nothing_heavy() -> None:
    loaded = in_a_fresh_process("import quicoll\nfound = sorted(sys.modules)")
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []
    assert [name for name in loaded if name.startswith("quicoll")] == ["quicoll", "quicoll.errors"]


@pytest.mark.slow
def test_every_public_name_resolves_in_a_process_that_has_imported_nothing_else() -> None:
    homes = in_a_fresh_process(
        "import quicoll\nfound = {name: type(getattr(quicoll, name)).__name__ for name in dir(quicoll)}"
    )
    assert list(homes) == sorted({*quicoll.__all__, *MODULES})
    assert (homes["Config"], homes["join"]) == ("type", "function")
    assert [homes[name] for name in MODULES] == ["module"] * len(MODULES)


def test_a_name_is_resolved_once_and_is_what_its_module_has() -> None:
    from quicoll.job import Job

    assert quicoll.Job is Job
    assert vars(quicoll)["Job"] is Job


@pytest.mark.slow
def test_a_star_takes_all_of_the_list() -> None:
    assert in_a_fresh_process("from quicoll import *\nfound = 'Job' in globals() and 'blocking' in globals()") is True


def test_a_name_that_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="module 'quicoll' has no attribute 'Jbo'"):
        quicoll.Jbo  # noqa: B018 - the look-up is the test
