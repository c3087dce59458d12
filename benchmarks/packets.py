"""What it takes to seal and to open a run of packets, one by one and all together, by the length of the run.

    python benchmarks/packets.py [--bytes 1452] [--rounds 400] [--json FILE]

Microseconds of one thread for a whole run, the median of the rounds; both ways take turns. A run that is opened lies
at another place each time, as where several senders' datagrams come mixed; one that is sealed always at the same.
`FEW_OPENED` and `FEW_SEALED` of quicoll_transport.quic.packets say up to which length the first way is taken. On a
machine whose processors others use as well only the ratios say anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from quicoll_transport.compiled import COMPILED
from quicoll_transport.quic import packets
from quicoll_transport.quic.keys import AES_128_GCM_SHA256, KeyPhases
from quicoll_transport.quic.packets import NUMBER, TAG, Slab, Slabs, open_run, seal_run

_CID = b"ourcid!!"
_STREAM = b"\x02"
_HEAD = 1 + len(_CID) + NUMBER
_LENGTHS = (2, 4, 6, 8, 12, 16, 24, 32, 64)
_MEMORY = 1 << 20
_ONE_BY_ONE, _TOGETHER = 1 << 20, 0


def _keys() -> KeyPhases:
    secret = bytes(range(32))
    return KeyPhases(AES_128_GCM_SHA256, secret, secret, key_packets=1 << 22, pto_ns=lambda: 10**9, confirmed=True)


class Runs:
    """One connection that sends to itself."""

    def __init__(self, size: int) -> None:
        self._keys = _keys()
        self._size = size
        self._number = 0
        self._slab, self._arrived = Slab(bytearray(_MEMORY)), memoryview(bytearray(2 * _MEMORY))
        self._slabs = Slabs()
        self._text = bytes(_MEMORY)
        self._at = 0

    def once(self, count: int, few: int) -> tuple[float, float]:
        """Seal a run and open it; return the microseconds of both."""
        packets.FEW_SEALED = packets.FEW_OPENED = few
        slots = self._slab.slots(self._size, _HEAD)
        step = self._size - _HEAD - 9 - len(_STREAM) - TAG
        pieces = [memoryview(self._text)[: step * count]]
        self._keys.send.packets = 0  # these keys are nobody's, and may bear any number of packets
        began = time.perf_counter_ns()
        _, made = seal_run(slots, 0, self._keys.send, _CID, self._number, _STREAM, 0, pieces, False)
        sealed = time.perf_counter_ns()
        self._at = (self._at + 7 * self._size) % _MEMORY
        memory = self._arrived[self._at : self._at + made]
        memory[:] = self._slab.memory[:made]
        before = time.perf_counter_ns()
        run = open_run(self._keys, self._slabs, memory, self._size, _CID, self._number - 1, 0)
        after = time.perf_counter_ns()
        if run.taken != count:
            raise AssertionError(f"{run.taken} of {count} packets were opened")
        self._number += count
        return (sealed - began) / 1e3, (after - before) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=1452, help="of a packet")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs = Runs(arguments.bytes)
    print(f"packets of {arguments.bytes} bytes, {'compiled' if COMPILED else 'pure Python'}; us of a run")
    print("length   seal: one by one  together    open: one by one  together")
    rows: list[dict[str, float]] = []
    for count in _LENGTHS:
        taken: dict[int, list[tuple[float, float]]] = {_ONE_BY_ONE: [], _TOGETHER: []}
        for _ in range(arguments.rounds):
            for few, samples in taken.items():
                samples.append(runs.once(count, few))
        (seal_one, open_one), (seal_all, open_all) = (
            [statistics.median(column) for column in zip(*samples, strict=True)] for samples in taken.values()
        )
        print(f"{count:6d}   {seal_one:16.1f}  {seal_all:8.1f}    {open_one:16.1f}  {open_all:8.1f}")
        rows.append({"packets": count, "seal_one_by_one_us": seal_one, "seal_together_us": seal_all,
                     "open_one_by_one_us": open_one, "open_together_us": open_all})  # fmt: skip
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
