"""A PostgreSQL server of a test's own, from Debian's programs, and a proxy in front of it whose network can be cut.

The server keeps its files in a temporary directory and listens on the loopback interface, on a free port. It refuses to
run as root, so a test that is root gives it to another user. It is ended by the process that it was started as.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from ports import named_port

from quicoll.membership.postgresql.connection import DatabaseConnection, Disconnected, Value

START_S = 60.0
USERS = ("postgres", "nobody")


def programs() -> Path | None:
    """Return the directory of the newest server's programs; None where there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


def missing() -> str:
    """Return why there can be no server here, "" where there can."""
    if programs() is None:
        return "there is no PostgreSQL server in /usr/lib/postgresql (apt install postgresql)"
    if os.geteuid() == 0 and other_user() is None:
        return f"PostgreSQL refuses to run as root, and there is no user of {', '.join(USERS)}"
    return ""


def other_user() -> pwd.struct_passwd | None:
    for name in USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


class Server:
    """Started by `start`; a context, at whose end it is gone with its files.

    network: an address of this machine, "10.0.0.1/24", at which it listens too, for all of that network; "" for none.
    """

    def __init__(self, network: str = "") -> None:
        found = programs()
        assert found is not None
        self._programs = found
        self.port = named_port(socket.SOCK_STREAM)
        self._directory = Path(tempfile.mkdtemp(prefix="quicoll-postgresql-"))
        self._process: subprocess.Popen[bytes] | None = None
        user = other_user() if os.geteuid() == 0 else None
        self._as = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        if user is not None:
            os.chown(self._directory, user.pw_uid, user.pw_gid)
        options = ["--no-sync", "--auth=trust", "--username=quicoll", "--locale=C", "--encoding=UTF8"]
        self._run([str(found / "initdb"), "-D", str(self._directory / "data"), *options])
        self._addresses = "127.0.0.1"
        if network:
            self._addresses += f",{network.partition('/')[0]}"
            with (self._directory / "data" / "pg_hba.conf").open("a") as rules:
                rules.write(f"host all all {ipaddress.ip_interface(network).network} trust\n")

    @property
    def url(self) -> str:
        return self.url_at(self.port)

    def url_at(self, port: int) -> str:
        return f"postgresql://quicoll@127.0.0.1:{port}/postgres"

    @property
    def pid(self) -> int:
        """Of the running server, and of its process group."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self) -> None:
        command = [str(self._programs / "postgres"), "-D", str(self._directory / "data"), "-h", self._addresses]
        command += ["-p", str(self.port), "-k", "", "-c", "shared_buffers=16MB", "-c", "max_connections=30"]
        log = (self._directory / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                process_group=0,  # a Ctrl-C is for who has started it
                **self._as,
            )
        until = time.monotonic() + START_S
        while True:
            try:
                DatabaseConnection.connect(self.url, until=time.monotonic() + 5.0).close()
                return
            except Disconnected as error:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise AssertionError(f"{error}; {(self._directory / 'log').read_text()[-2000:]}") from error
                time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it: SIGINT ends its sessions and shuts down in order, SIGQUIT is like a crash."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(START_S)
            self._process = None

    def execute(self, statement: str, *values: Value) -> list[tuple[Value, ...]]:
        connection = DatabaseConnection.connect(self.url, until=time.monotonic() + 20.0)
        try:
            return connection.execute(statement, values, until=time.monotonic() + 20.0)
        finally:
            connection.close()

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, check=False, cwd=self._directory, **self._as)
        assert done.returncode == 0, done.stderr.decode()


class Proxy:
    """Forwards TCP connections to a port, until `cut`: then every byte stays where it is, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._through = True
        self._ends = threading.Event()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        for end in (*self._pairs, self._listener):
            end.close()

    def cut(self) -> None:
        self._through = False

    def repair(self) -> None:
        self._through = True

    def _forward(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._ends.is_set():
                if not self._through:
                    time.sleep(0.01)
                    continue
                for key, _ in selector.select(0.01):
                    if key.fileobj is self._listener:
                        here, _address = self._listener.accept()
                        try:
                            there = socket.create_connection(("127.0.0.1", self._target))
                        except OSError:  # the server is away
                            here.close()
                            continue
                        self._pairs[here], self._pairs[there] = there, here
                        selector.register(here, selectors.EVENT_READ)
                        selector.register(there, selectors.EVENT_READ)
                    elif isinstance(key.fileobj, socket.socket):
                        self._pass(key.fileobj, selector)

    def _pass(self, end: socket.socket, selector: selectors.BaseSelector) -> None:
        other = self._pairs.get(end)
        if other is None:
            return
        data = b""
        with contextlib.suppress(OSError):
            data = end.recv(1 << 16)
        if data:
            with contextlib.suppress(OSError):
                other.sendall(data)
            return
        for each in (end, other):
            selector.unregister(each)
            del self._pairs[each]
            each.close()
