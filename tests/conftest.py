"""What all tests share."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import warm

from quicoll_transport.compiled import COMPILED
from quicoll_transport.net.addresses import is_numeric

# The ranks of a test are all on this host. Tests of what goes over QUIC stay tests of that; those of shared memory ask
# for it (tests/loopback/test_local.py).
os.environ.setdefault("QUICOLL_LOCAL", "0")

QUICK = [Path(__file__).parent / folder for folder in ("unit", "transport")]
# Words of a file in these folders without which none of its tests is slow or on the loopback interface.
NOT_QUICK = ("mark.slow", "mark.loopback", "needs_v6")


def in_quick_folders(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in QUICK)


def may_have_others(path: Path) -> bool:
    text = path.read_text()
    return any(word in text for word in NOT_QUICK)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import, for `make system`, a file that has no test for it: most have none, and importing is dear.

    `make check` imports all of them and fails where this is wrong of one.
    """
    expression = config.getoption("markexpr")
    if not collection_path.name.startswith("test_"):
        return None
    if expression == "interpreted and not quick":
        return None if "mark.interpreted" in collection_path.read_text() else True
    if expression != "not quick":
        return None
    return True if in_quick_folders(collection_path) and not may_have_others(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark "quick", for `make check`, what is in these folders and is neither slow nor on the loopback interface.

    Where the hot modules are compiled, skip what replaces a part of them.
    """
    replaces = pytest.mark.skip(reason="replaces a part of the code, which only the interpreter allows")
    files: dict[Path, bool] = {}
    for item in items:
        if COMPILED and item.get_closest_marker("interpreted"):
            item.add_marker(replaces)
        if item.path not in files:
            files[item.path] = in_quick_folders(item.path)
        if not files[item.path]:
            continue
        if not (item.get_closest_marker("slow") or item.get_closest_marker("loopback")):
            item.add_marker("quick")
        elif not may_have_others(item.path):
            raise pytest.UsageError(f"{item.nodeid} is not quick, and no word of its file says so: {NOT_QUICK}")


# While thousands of tests are made, and nothing but them, there is next to no garbage to look for.
if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Thousands of tests stay to the end: no collection of garbage need look at them again."""
    gc.freeze()
    gc.enable()


# The process that warm tests are forked from.
STORE = pytest.StashKey[warm.Store]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Begin the store of warm processes before any test has run."""
    options = session.config.option
    if not (options.collectonly or options.usepdb) and any(map(warm.is_warm, session.items)):
        session.config.stash[STORE] = warm.Store(session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    store = item.config.stash.get(STORE, None)
    if store is None or not warm.is_warm(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in store.run(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    if (store := config.stash.get(STORE, None)) is not None:
        store.close()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Any]:
    """A PostgreSQL server for the tests of one process, which takes a second or two to be made."""
    server = pytest.importorskip("postgresql_server", reason="psycopg is not installed")
    if why := server.missing():
        pytest.skip(why)
    with server.Server() as made:
        yield made


@pytest.fixture(autouse=True)
def quick_tests_start_no_process_and_bind_no_socket(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("quick") is None:
        return

    def refuse(*arguments: object, **options: object) -> NoReturn:
        pytest.fail("a quick test starts a process or binds a socket; mark it slow or loopback")

    # Not connect: on a datagram socket it sends nothing, and is how the system is asked for a route.
    for owner, name in [
        (subprocess.Popen, "__init__"),
        (os, "fork"),
        (os, "posix_spawn"),
        (socket.socket, "bind"),
    ]:
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors of a test gain nothing by torch's threads, which spin where the machine has other work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks a name server: how long one takes, and what it says, differs from machine to machine.

    Known are "localhost" and numeric addresses; any other name has no address, at once.
    """
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in (None, "", "localhost") and not is_numeric(str(host)):
            str(host).encode("idna")  # the UnicodeError of what cannot even be asked
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
