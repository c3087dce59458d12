"""Promises of this process and machine about bits: which results are equal everywhere, which may differ, and why.

    print(quicoll.determinism_report())

Three verdicts: "guaranteed": the same bits on every rank, independent of the rest of this report; what that rests on
has been checked here and now. "depends": the same bits only between processes for which the value shown is the same;
often not even that is enough, and `why` says so. "unknown": could not be found out here.

The border runs between quicoll and the user's own computation. What quicoll computes (collectives, exact sums, random
numbers, compressed formats) uses IEEE 754's basic operations and integers in an order of its own, and no library's
choice. What a training step computes between collectives is as deterministic as its libraries: on one machine mostly,
on different processors mostly not (a matrix product's order of additions follows vector width and number of threads).
Such a difference is not hidden by a collective: it is an input that differs, and `quicoll audit diff` finds it.

Compare reports of two ranks with `fingerprint`: equal ones mean that every value below is equal.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.dtypes import COMPLEX64, FLOAT16, FLOAT32, Array, DType, narrow, require_ieee
from quicoll.numerics.generator import Generator
from quicoll.numerics.reduce import Precision, ReduceOp, accumulator, reduce_tree

__all__ = ["DeterminismReport", "Finding", "Guarantee", "determinism_report", "quicoll_version"]


class Guarantee(StrEnum):
    """Bits are guaranteed, depend on the value shown, or are unknown."""

    GUARANTEED = "guaranteed"
    DEPENDS = "depends"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        value: Its value here.
        verdict: What it means for bits.
        why: The reason.
    """

    name: str
    value: str
    verdict: Guarantee
    why: str


@dataclass(frozen=True, slots=True)
class DeterminismReport:
    """All findings in a fixed order. Printed, it is one finding a line."""

    findings: tuple[Finding, ...]

    @property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits, equal where all names, values and verdicts are equal."""
        seen = [[finding.name, finding.value, finding.verdict] for finding in self.findings]
        return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]

    def json(self) -> str:
        """Return one JSON object: fingerprint, and findings with name, value, verdict and why."""
        return json.dumps({"fingerprint": self.fingerprint, "findings": [asdict(finding) for finding in self.findings]})

    def __getitem__(self, name: str) -> Finding:
        """The finding called `name`. Raises KeyError."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [f"determinism {self.fingerprint}"]
        for finding in self.findings:
            lines.append(f"{finding.verdict:<10}  {finding.name:<18}  {finding.value}")
            lines.append(f"{'':<32}{finding.why}")
        return "\n".join(lines)


def quicoll_version() -> str:
    """Return quicoll's version, "" where it is not installed but imported from a checkout."""
    try:
        return importlib.metadata.version("quicoll")
    except importlib.metadata.PackageNotFoundError:
        return ""


def determinism_report() -> DeterminismReport:
    """Look at this thread, process and machine: which bits are guaranteed, which depend on what, and why.

    Takes milliseconds, changes nothing, and does not import torch: what is loaded is looked at.

    Returns:
        The report. Compare the reports of two ranks by `fingerprint`.
    """
    return DeterminismReport(
        (
            _arithmetic(),
            _own_results(),
            _numpy(),
            _blas(),
            *_torch(sys.modules.get("torch")),
            _hashes(),
            _platform(),
        )
    )


# ---------------------------------------------------------------------------------------------------------------------
# quicoll's own


def _arithmetic() -> Finding:
    name = "arithmetic"
    try:
        require_ieee()
    except LocalError as error:
        return Finding(
            name=name,
            value=error.message,
            verdict=Guarantee.DEPENDS,
            why="collectives refuse to compute on such a thread; look for torch.set_flush_denormal or -ffast-math",
        )
    return Finding(
        name=name,
        value="rounds to nearest, keeps subnormals",
        verdict=Guarantee.GUARANTEED,
        why="this thread's mode was asked; each reduction asks again on its own thread",
    )


# Of the reductions in `_known_answer`; changes only with the promise itself.
_KNOWN_ANSWER = "86a822c0f4433004"


def _own_results() -> Finding:
    name = "collectives"
    try:
        found = _known_answer()
    except LocalError as error:
        return Finding(name=name, value="refused", verdict=Guarantee.DEPENDS, why=error.message)
    if found != _KNOWN_ANSWER:
        return Finding(
            name=name,
            value=f"known answer is {found}, not {_KNOWN_ANSWER}",
            verdict=Guarantee.DEPENDS,
            why="this machine computes other bits than it must: do not train on it, and report it",
        )
    return Finding(
        name=name,
        value=f"known answer {found}",
        verdict=Guarantee.GUARANTEED,
        why="random numbers and reductions in three precisions gave the bits that they give everywhere",
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    values: Array
    wide: bool = False


def _known_answer() -> str:
    """A digest over reductions of numbers that are drawn for it: a thousand elements and seven leaves of each type."""
    state = hashlib.sha256()
    generator = Generator(754)
    cases: list[tuple[DType, ReduceOp, Precision]] = [
        (FLOAT32, ReduceOp.SUM, "default"),
        (FLOAT16, ReduceOp.AVG, "default"),
        (FLOAT32, ReduceOp.AVG, "float64"),
        (FLOAT32, ReduceOp.AVG, "exact"),
        (COMPLEX64, ReduceOp.PRODUCT, "default"),
    ]
    for dtype, op, precision in cases:
        leaves = []
        for _ in range(7):
            drawn = generator.normal(2000 if dtype.part else 1000, dtype="float32")
            leaf = np.empty(1000, dtype.storage)
            if dtype.part:
                leaf.view(np.float32)[:] = drawn
            else:
                narrow(drawn, FLOAT32, dtype, leaf)
            leaves.append(_Leaf(leaf))
        a, b, c, d, e, f, g = leaves
        out = np.empty(1000, dtype.storage)
        reduce_tree(
            (((a, b), (c, d)), ((e, f), g)),
            lambda leaf: leaf.values,
            op=op, dtype=dtype, acc=accumulator(dtype, op, precision), out=out, final=True, leaves=7,
        )  # fmt: skip
        state.update(out.tobytes())
    return state.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# The user's


def _numpy() -> Finding:
    found = "unknown vector units"
    try:
        found = " ".join(np.show_config(mode="dicts")["SIMD Extensions"]["found"])
    except (KeyError, TypeError):
        pass
    return Finding(
        name="numpy",
        value=f"{np.__version__}, {found or 'baseline only'}",
        verdict=Guarantee.DEPENDS,
        why="+ - * / and square roots are the same everywhere; sums over an axis, exp, log, sin are the version's "
        "and the vector unit's",
    )


def _blas() -> Finding:
    name, why = "blas", "the order of additions in a matrix product follows library, processor and threads"
    try:
        # Optional; no stubs.
        pools = importlib.import_module("threadpoolctl").threadpool_info()
    except ImportError:
        pools = None
    if pools is not None:
        blas = [
            f"{pool['internal_api']} {pool.get('version') or '?'} "
            f"({pool.get('architecture') or 'processor not named'}), {pool['num_threads']} threads"
            for pool in pools
            if pool["user_api"] == "blas"
        ]
        if blas:
            return Finding(name=name, value="; ".join(sorted(blas)), verdict=Guarantee.DEPENDS, why=why)
    try:
        built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        value = f"{built['name']} {built['version']}, threads not known"
    except (KeyError, TypeError):
        value = "not known"
    return Finding(name=name, value=value, verdict=Guarantee.UNKNOWN, why=f"{why}; install threadpoolctl to see them")


def _torch(torch: ModuleType | Any) -> list[Finding]:
    if torch is None:
        try:
            installed = f"{importlib.metadata.version('torch')}, not imported here"
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        return [
            Finding(
                name="torch",
                value=installed,
                verdict=Guarantee.UNKNOWN,
                why="import it before, to see its settings; quicoll itself computes nothing with it",
            )
        ]
    findings = [
        Finding(
            name="torch",
            value=f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
            verdict=Guarantee.DEPENDS,
            why="sums and matrix products on the CPU are split by threads and vector width; torch promises no equal "
            "bits between versions, platforms or devices",
        ),
        Finding(
            name="torch algorithms",
            value="deterministic" if torch.are_deterministic_algorithms_enabled() else "any",
            verdict=Guarantee.DEPENDS,
            why="equal runs on one machine are equal for what torch knows of"
            if torch.are_deterministic_algorithms_enabled()
            else "some operations add up as threads arrive; torch.use_deterministic_algorithms(True) refuses them",
        ),
    ]
    if not torch.cuda.is_available():
        value, why = "no device", "nothing is computed there"
        return [*findings, Finding(name="cuda", value=value, verdict=Guarantee.GUARANTEED, why=why)]
    cudnn = torch.backends.cudnn
    settings = [
        *sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}),
        f"cuda {torch.version.cuda}",
        f"cudnn {cudnn.version()} {'deterministic' if cudnn.deterministic else 'any algorithm'}"
        f"{', benchmarked' if cudnn.benchmark else ''}",
        f"float32 products {torch.get_float32_matmul_precision()}",
        f"CUBLAS_WORKSPACE_CONFIG={os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}",
    ]
    return [
        *findings,
        Finding(
            name="cuda",
            value=", ".join(settings),
            verdict=Guarantee.DEPENDS,
            why="a device's bits are its model's and its libraries'; benchmarking picks algorithms by time",
        ),
    ]


def _hashes() -> Finding:
    seed = os.environ.get("PYTHONHASHSEED", "random")
    if sys.flags.hash_randomization and seed == "random":
        value = "random"
        why = (
            "the order of a set of strings differs between processes; quicoll iterates over none, a user's program may"
        )
    else:
        value, why = f"PYTHONHASHSEED={seed}", "sets of strings have one order in all such processes"
    return Finding(name="hash order", value=value, verdict=Guarantee.DEPENDS, why=why)


def _platform() -> Finding:
    return Finding(
        name="platform",
        value=f"{platform.system()} {platform.machine()}, {platform.python_implementation()} "
        f"{platform.python_version()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}".rstrip(),
        verdict=Guarantee.DEPENDS,
        why="math.exp and the like are the C library's",
    )
