"""What this host and this installation give: versions, compiled modules, datagrams in batches, the process's limits."""

from __future__ import annotations

import operator
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from quicoll.doctor.finding import CheckResult, fine, note, wrong
from quicoll_transport.compiled import COMPILED
from quicoll_transport.errors import ConfigurationError
from quicoll_transport.net.offload import supported
from quicoll_transport.quic import check_foundation

__all__ = ["batches", "compiled", "descriptors", "memory_bounds", "socket_buffers", "versions"]

_LEAST_PYTHON = (3, 11)
_TOLD = ("aioquic", "cryptography", "torch")  # in the sentence, where all is well
_DESCRIPTORS = 64  # a rank's own: socket, journal, events, traces, pipes; the program has its own beside them
_BASE_BYTES = 256 << 20  # of the interpreter with its libraries
_CREDIT_BYTES = 32 << 20  # that a link may hold for messages which nobody waits for yet (EndpointConfig.credit_bytes)
_BUFFER_BYTES = 1 << 20
_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def versions(
    needed: Sequence[str] | None = None, installed: Callable[[str], str] = version, python: tuple[int, ...] = ()
) -> list[CheckResult]:
    """Compare the versions of Python and of what quicoll needs with the ranges that it was made for.

    Args:
        needed: Requirements as in the package's metadata; None reads that.
        installed: Gives the version of a package, or raises PackageNotFoundError.
        python: The interpreter's version; none takes the one that runs.
    """
    python = python or sys.version_info[:3]
    findings: list[CheckResult] = []
    if python[:2] < _LEAST_PYTHON:
        least = ".".join(map(str, _LEAST_PYTHON))
        says = f"This is Python {'.'.join(map(str, python))}, and quicoll needs {least} or later."
        findings.append(wrong("versions", says, f"Make an environment with Python {least} or later."))
    if needed is None:
        try:
            needed = requires("quicoll") or ()
        except PackageNotFoundError:
            says = "quicoll is not installed as a package, so the versions that it needs are not known."
            return [*findings, note("versions", says, "pip install quicoll, or -e its directory.")]
    for name, bounds in _ranges(needed):
        try:
            found = installed(name)
        except PackageNotFoundError:
            if bounds.extra:
                continue  # of an extra that was not asked for
            says = f"{name} is not installed, and quicoll needs it ({bounds.text})."
            findings.append(wrong("versions", says, f"pip install '{name}{bounds.text}'"))
            continue
        if not bounds.hold(found):
            says = f"{name} {found} is installed, and quicoll was made for {bounds.text}."
            findings.append(wrong("versions", says, f"pip install '{name}{bounds.text}'"))
    if findings:
        return findings
    try:
        check_foundation()
    except ConfigurationError as error:
        return [wrong("versions", f"The QUIC library is not as it has to be: {error}.", "pip install 'aioquic==1.7.2'")]
    told = [f"Python {'.'.join(map(str, python))}"]
    for name in _TOLD:
        try:
            told.append(f"{name} {installed(name)}")
        except PackageNotFoundError:
            told.append(f"no {name}")
    return [fine("versions", f"{', '.join(told)}: within what quicoll was made for.")]


class _Range:
    def __init__(self, text: str, *, extra: bool) -> None:
        self.text = text
        self.extra = extra

    def hold(self, found: str) -> bool:
        here = _numbers(found)
        for sign, bound in re.findall(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)", self.text):
            there = _numbers(bound)
            width = max(len(here), len(there))
            if not _OPERATORS[sign](_padded(here, width), _padded(there, width)):
                return False
        return True


def _ranges(needed: Iterable[str]) -> list[tuple[str, _Range]]:
    ranges: dict[str, _Range] = {}
    for line in needed:
        what, _, marker = line.partition(";")
        if "'dev'" in marker or '"dev"' in marker:
            continue
        if (parts := re.fullmatch(r"\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^)]*)\)?\s*", what)) is None:
            continue
        name, bounds = parts[1], ",".join(sorted(parts[2].replace(" ", "").split(","), reverse=True))
        if name != "quicoll":
            ranges.setdefault(name, _Range(bounds, extra="extra" in marker))
    return list(ranges.items())


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _padded(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    return numbers + (0,) * (width - len(numbers))


def compiled() -> list[CheckResult]:
    """Say whether the compiled form of the hot modules is in use."""
    if COMPILED:
        return [fine("compiled", "The compiled modules are in use.")]
    says = f"The modules run as plain Python ({platform.python_implementation()}): the same results, more CPU time."
    return [note("compiled", says, "For speed, install a wheel with compiled modules for this platform.")]


def batches() -> list[CheckResult]:
    """Say whether the system takes and gives several datagrams in one call (UDP_SEGMENT, UDP_GRO)."""
    offload = supported()
    missing = [name for name, there in (("sent", offload.sends), ("received", offload.receives)) if not there]
    if not missing:
        return [fine("batches", "Datagrams are sent (GSO) and received (GRO) many at a time.")]
    says = (
        f"Datagrams cannot be {' or '.join(missing)} many at a time here, which costs up to eight times the CPU time."
    )
    return [note("batches", says, "Use Linux 5.0 or later, on the host itself or in a container of it.")]


def socket_buffers(least: int = _BUFFER_BYTES) -> list[CheckResult]:
    """Say whether a socket gets a buffer that holds what arrives while the process is busy.

    Args:
        least: Bytes that should be granted.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        granted = probe.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2  # Linux counts its own part as well
    if granted >= least:
        return [fine("buffers", f"A socket gets {granted >> 10} KiB to receive into.")]
    says = (
        f"A socket gets {granted >> 10} KiB to receive into; what comes in a burst beyond that is lost, and sent again."
    )
    return [note("buffers", says, "As root: sysctl -w net.core.rmem_max=4194304 net.core.wmem_max=4194304")]


def descriptors(limit: int | None = None, used: int | None = None) -> list[CheckResult]:
    """Say whether the process may open the files that a rank needs.

    Args:
        limit: The soft limit; None asks the system.
        used: How many are open; None asks the system.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if used is None:
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError:
            used = 16
    if limit == resource.RLIM_INFINITY or limit - used >= _DESCRIPTORS:
        shown = "without a limit" if limit == resource.RLIM_INFINITY else f"{limit}"
        return [fine("descriptors", f"Open files: {shown}, {used} in use.")]
    says = f"This process may open {limit} files and has {used} open; a rank needs {_DESCRIPTORS} more."
    return [wrong("descriptors", says, "ulimit -n 1024, or LimitNOFILE= of the service.")]


def memory_bounds(links: int, root: Path = Path("/sys/fs/cgroup"), available: int | None = None) -> list[CheckResult]:
    """Say whether there is memory for what links may hold at the worst.

    Args:
        links: How many links the rank will have.
        root: Of the control groups' files.
        available: Bytes that the host has left; None asks the system.
    """
    needed = _BASE_BYTES + links * _CREDIT_BYTES
    bounds: list[tuple[int, str, str]] = []
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY:
        bounds.append((soft, "the limit of address space", "ulimit -v unlimited"))
    if (group := _cgroup(root)) is not None:
        bounds.append((group, "what the control group has left", "Raise the memory limit of the container or service."))
    available = _available() if available is None else available
    if available is not None:
        bounds.append((available, "what this host has left", "Run fewer processes here, or use a larger host."))
    if not bounds:
        return [note("memory", "How much memory there is cannot be told here.")]
    least, what, advice = min(bounds)
    says = f"{what} is {least >> 20} MiB; quicoll may need {needed >> 20} MiB for {links} links, beside the program's"
    if least < needed:
        return [wrong("memory", f"{says[0].upper()}{says[1:]} own.", advice)]
    return [fine("memory", f"{says[0].upper()}{says[1:]} own.")]


def _cgroup(root: Path) -> int | None:
    try:
        most = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        return None if most == "max" else max(int(most) - used, 0)
    except (OSError, ValueError):
        return None


def _available() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
