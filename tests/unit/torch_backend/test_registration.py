"""torch learns of the backend without a cost, and nothing can make its import fail."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
HEAVY = ("aioquic", "cryptography", "msgspec", "quicoll_transport", "xxhash")


def test_the_entry_point_is_the_function_that_registers() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["torch.backends"] == {"quicoll": "quicoll.torch_backend.registration:register_backend"}


def test_to_be_known_again_changes_nothing() -> None:
    import torch.distributed as dist

    from quicoll.torch_backend.registration import register_backend

    register_backend()
    known = dict(dist.Backend._plugins)
    register_backend()
    assert dist.Backend._plugins == known
    assert dist.is_backend_available("quicoll")
    assert dist.Backend.backend_capability["quicoll"] == ["cpu", "cuda"]
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"


def test_whatever_torch_does_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from quicoll.torch_backend.registration import register_backend

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise TypeError("another signature")

    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    register_backend()
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    register_backend()


@pytest.mark.slow
def test_what_torch_loads_at_its_import_is_light_and_starts_no_thread() -> None:
    program = (
        "import json, sys, threading, torch\n"
        "before = {*sys.modules}\n"
        "from quicoll.torch_backend.registration import register_backend\n"
        "register_backend()\n"
        "print(json.dumps([sorted({*sys.modules} - before), threading.active_count()]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    loaded, threads = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []
    assert {name for name in loaded if name.startswith("quicoll")} <= {
        "quicoll",
        "quicoll.errors",
        "quicoll.torch_backend",
        "quicoll.torch_backend.names",
        "quicoll.torch_backend.registration",
    }
    assert threads == 1


def test_no_thread_is_there_before_a_group_is() -> None:
    assert not any(thread.name == "quicoll-torch" for thread in threading.enumerate())
