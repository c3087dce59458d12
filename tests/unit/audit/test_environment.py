"""The report says what is so, and calls nothing guaranteed that is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch

import quicoll
from quicoll.audit import environment as determinism
from quicoll.audit.environment import DeterminismReport, Guarantee, determinism_report


def test_every_part_is_reported_with_a_verdict_and_a_reason() -> None:
    report = quicoll.determinism_report()
    names = [finding.name for finding in report.findings]
    assert names[:4] == ["arithmetic", "collectives", "numpy", "blas"]
    assert {"torch", "torch algorithms", "cuda", "hash order", "platform"} < set(names)
    assert all(finding.value and finding.why and isinstance(finding.verdict, Guarantee) for finding in report.findings)
    assert report["arithmetic"].verdict is report["collectives"].verdict is Guarantee.GUARANTEED
    assert report["numpy"].verdict is report["torch"].verdict is Guarantee.DEPENDS
    assert np.__version__ in report["numpy"].value
    assert torch.__version__ in report["torch"].value
    with pytest.raises(KeyError):
        report["nothing"]
    with pytest.raises(FrozenInstanceError):
        report.findings = ()


def test_it_prints_and_is_json() -> None:
    report = determinism_report()
    lines = str(report).splitlines()
    assert len(lines) == 1 + 2 * len(report.findings)
    assert lines[1].startswith("guaranteed  arithmetic")
    parsed = json.loads(report.json())
    assert parsed["fingerprint"] == report.fingerprint
    assert [finding["verdict"] for finding in parsed["findings"]] == [str(f.verdict) for f in report.findings]


def test_the_fingerprint_is_of_values_and_verdicts() -> None:
    report = determinism_report()
    assert determinism_report().fingerprint == report.fingerprint
    changed = replace(report.findings[2], value="another")
    assert DeterminismReport((*report.findings[:2], changed, *report.findings[3:])).fingerprint != report.fingerprint


@pytest.fixture
def _flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("_flushing")
def test_a_thread_that_flushes_subnormals_is_called_by_its_name() -> None:
    report = determinism_report()
    assert report["arithmetic"].verdict is report["collectives"].verdict is Guarantee.DEPENDS
    assert "flushes subnormal" in report["arithmetic"].value
    assert report["collectives"].value == "refused"


def test_another_known_answer_is_no_guarantee(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit in one element of one reduction is enough."""
    reduce_tree = determinism.reduce_tree

    def wrong(*arguments: Any, **options: Any) -> None:
        reduce_tree(*arguments, **options)
        options["out"].view(np.uint8)[-1] ^= 1

    monkeypatch.setattr(determinism, "reduce_tree", wrong)
    finding = determinism_report()["collectives"]
    assert finding.verdict is Guarantee.DEPENDS
    assert "do not train on it" in finding.why


def test_settings_of_torch_are_seen() -> None:
    threads = torch.get_num_threads()
    assert determinism_report()["torch algorithms"].value == "any"
    torch.use_deterministic_algorithms(True)
    try:
        torch.set_num_threads(1)
        report = determinism_report()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert report["torch algorithms"].value == "deterministic"
    assert report["torch"].value.endswith(" 1 threads")


def test_a_cuda_device_is_described_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some Device")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    finding = determinism_report()["cuda"]
    assert finding.verdict is Guarantee.DEPENDS
    assert finding.value.startswith("Some Device, cuda")
    assert "any algorithm" in finding.value
    assert finding.value.endswith("CUBLAS_WORKSPACE_CONFIG=:4096:8")


def test_without_threadpoolctl_threads_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    finding = determinism_report()["blas"]
    assert finding.verdict is Guarantee.UNKNOWN
    assert "install threadpoolctl" in finding.why


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "expected"), [("7", "PYTHONHASHSEED=7"), ("random", "random"), (None, "random")])
def test_a_process_without_torch_does_not_import_it(seed: str | None, expected: str) -> None:
    program = (
        "import sys\nfrom quicoll.audit.environment import determinism_report\nr = determinism_report()\n"
        "assert 'torch' not in sys.modules\nassert 'not imported here' in r['torch'].value\n"
        "assert r['torch'].verdict == 'unknown'\nprint(r['hash order'].value)"
    )
    environment = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run([sys.executable, "-c", program], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == expected
