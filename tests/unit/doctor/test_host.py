"""What a doctor says of a host and an installation."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from quicoll.doctor import host

NEEDED = ["aioquic<1.8,>=1.7.2", "numpy>=2.0", "torch>=2.6; extra == 'torch'", "ruff>=0.12; extra == 'dev'"]


def installed(**found: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    return version


@pytest.mark.parametrize(
    ("found", "says", "advice"),
    [
        ({"aioquic": "1.8.0", "numpy": "2.4.6"}, "aioquic 1.8.0 is installed", "pip install 'aioquic>=1.7.2,<1.8'"),
        ({"aioquic": "1.7.1", "numpy": "2.4.6"}, "aioquic 1.7.1 is installed", "pip install 'aioquic>=1.7.2,<1.8'"),
        ({"aioquic": "1.7.2", "numpy": "1.26"}, "numpy 1.26 is installed", "pip install 'numpy>=2.0'"),
        ({"aioquic": "1.7.2"}, "numpy is not installed", "pip install 'numpy>=2.0'"),
        ({"aioquic": "1.7.2", "numpy": "2", "torch": "2.5.1"}, "torch 2.5.1 is installed", "pip install 'torch>=2.6'"),
    ],
)
def test_a_version_outside_of_its_range_is_named_with_the_command_that_helps(
    found: dict[str, str], says: str, advice: str
) -> None:
    (finding,) = host.versions(NEEDED, installed(**found))
    assert (finding.state, finding.advice) == ("wrong", advice)
    assert finding.says.startswith(says)


def test_versions_in_range_are_told_in_one_line() -> None:
    found = installed(aioquic="1.7.10", numpy="2.0", torch="2.13.0+cpu", ruff="0.1")
    (finding,) = host.versions(NEEDED, found)
    assert finding.state == "fine"
    assert "aioquic 1.7.10, no cryptography, torch 2.13.0+cpu" in finding.says


def test_an_old_python_is_wrong() -> None:
    findings = host.versions(NEEDED, installed(aioquic="1.7.2", numpy="2"), (3, 10, 4))
    assert [finding.state for finding in findings] == ["wrong"]
    assert "This is Python 3.10.4" in findings[0].says


def test_too_few_files_are_wrong_and_enough_are_fine() -> None:
    assert [each.state for each in host.descriptors(limit=128, used=100)] == ["wrong"]
    assert [each.state for each in host.descriptors(limit=1024, used=100)] == ["fine"]


def test_the_least_of_the_bounds_on_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{900 << 20}\n")
    (finding,) = host.memory_bounds(8, tmp_path, available=64 << 30)
    assert finding.state == "wrong"
    assert "What the control group has left is 124 MiB; quicoll may need 512 MiB for 8 links" in finding.says
    (tmp_path / "memory.max").write_text("max\n")
    (finding,) = host.memory_bounds(8, tmp_path, available=64 << 30)
    assert finding.state == "fine"
