"""Copies per payload byte in this process, by counting memcpy: `PYTHONPATH=.:transport python benchmarks/copies.py`.

Needs Linux, a C compiler (`cc`) and a Python that calls the C library's memcpy. The script builds copies.c, starts
itself again with that library before all others, and carries one message between two sessions in memory: no socket, no
loss. JSON on standard output: bytes copied for each byte of payload, by stage; in pieces of 4 to 64 KiB (packets carry
8.9 KB, slices 64 KiB), and as "moved" in larger ones, which are whole stream buffers. Encryption and decryption are no
memcpy; each reads and writes every byte once more.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from quicoll_transport.link.core import LinkConfig, LinkCore, LinkId
from quicoll_transport.link.detector import DetectorConfig
from quicoll_transport.link.frames import TAG_SIZE, Header, checksum
from quicoll_transport.quic import Gate, Session, SessionConfig, handshake_in_memory
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.identity import WORKER, Identity

_SIZE = 64 << 20
_ADDRESS = ("127.0.0.1", 2)
_LIBRARY = "QUICOLL_TEST_COPIES"  # where the child finds what its parent built


class Counter:
    """Bytes copied while it is entered."""

    def __init__(self) -> None:
        self.copied = self.moved = 0
        library = ctypes.CDLL(os.environ[_LIBRARY])
        self._copied = ctypes.c_ulonglong.in_dll(library, "quicoll_copied")
        self._moved = ctypes.c_ulonglong.in_dll(library, "quicoll_moved")

    def __enter__(self) -> None:
        self._before = self._copied.value, self._moved.value

    def __exit__(self, *_: object) -> None:
        self.copied += self._copied.value - self._before[0]
        self.moved += self._moved.value - self._before[1]


def measure() -> dict[str, float]:
    probe = Counter()
    with probe:
        bytearray(bytes(_SIZE))
    if (probe.copied, probe.moved) != (0, _SIZE):
        raise SystemExit(f"memcpy cannot be counted here: {probe.moved} of {_SIZE} bytes were seen")
    a, b = Identity("j", WORKER, "a"), Identity("j", WORKER, "b")
    made = ephemeral("j", [(WORKER, "a"), (WORKER, "b")])
    config = SessionConfig(datagram_bytes=8900)
    client = Session.client(credentials=made[a], config=config, address=_ADDRESS, now_ns=10**18)
    server, _, _ = handshake_in_memory(client, Gate(credentials=made[b], config=config))
    core = LinkCore(
        peer="peer",
        local=LinkId(1, 1),
        config=LinkConfig(DetectorConfig.from_lost_after(10**12), credit_bytes=2 * _SIZE),
        now_ns=0,
        on_app=lambda data: None,
        on_state=lambda state: None,
    )
    data, memory, tag = random.Random(1).randbytes(_SIZE), bytearray(_SIZE), bytes(TAG_SIZE)
    posted = core.post(tag, memoryview(memory), lambda posted: None)
    server.attach(core)
    client.start_message("m", Header(tag, 0, _SIZE, checksum(data)).encode(), memoryview(data))
    sending, receiving, answers = Counter(), Counter(), Counter()
    now, sent = 10**18 + 10**9, 0
    while not posted.done:
        now += 2_000_000
        for session in (client, server):
            at = session.next_timer()
            if at is not None and at <= now:
                session.handle_timer(now)
        with sending:
            out = client.datagrams_to_send(now)
        for run in out:
            sent += len(run.memory)
            with receiving:
                server.receive(run, now)
        with answers:
            back = server.datagrams_to_send(now)
            for run in back:
                client.receive(run, now)
    if memory != data:
        raise SystemExit("the message was altered")
    ends = {"sending": sending, "receiving": receiving, "acknowledgements": answers}
    figures = {name: round(counter.copied / _SIZE, 2) for name, counter in ends.items()}
    figures |= {f"{name}, moved": round(counter.moved / _SIZE, 2) for name, counter in ends.items()}
    return figures | {"bytes sent": round(sent / _SIZE, 3)}


def main() -> None:
    if _LIBRARY in os.environ:
        sys.stdout.write(json.dumps(measure()) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "copies.so")
        source = str(Path(__file__).with_name("copies.c"))
        command = ["cc", "-O2", "-fno-builtin", "-shared", "-fPIC", "-o", library, source, "-ldl"]
        subprocess.run(command, check=True)
        env = os.environ | {"LD_PRELOAD": library, _LIBRARY: library}
        subprocess.run([sys.executable, __file__], check=True, env=env)


if __name__ == "__main__":
    main()
