"""examples/diloco.py by four ranks of the library, over an emulated line.

    python benchmarks/diloco_emulated.py --emulator ../shared/wanem/wanem.py [--profile wan] [--seconds 2400]
                                         [--build FOLDER] -- [OPTIONS OF THE EXAMPLE]

    python benchmarks/diloco_emulated.py --emulator ../shared/wanem/wanem.py -- --wire int4 --rounds 160 --every 56 \
        --pieces 32 --fragments 1 --delay 2 --mix 0.2 --rate 0.016 --momentum 0.8 --algorithm direct --anneal \
        --dropout 0

Each rank is in a network namespace of its own, and the emulator between them (root, Linux; it takes down what it has
made). bbr is what they send by. Ranks are bound to the processors in their order, half of them to the first of two; the
coordinator to the first and the emulator to the second, so that none has more to do: where the system places them the
ranks beside those two are slower, and the others wait for them. With --build the modules are those of a folder, as
`make compiled` leaves one.

Told are the last lines of each rank, which say the loss of what is held out, what it has sent, and how much of the time
it computed; then the seconds of it all, and the bytes that the emulator took from each host.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _emulator import load_emulator

from quicoll_transport.security.authority import create_authority, issue

RANKS, PORT, JOB = 4, 4433, "diloco"
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "diloco.py"
TOLD = 6  # lines at the end of a rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulator", type=Path)
    parser.add_argument("--profile", default="wan")
    parser.add_argument("--seconds", type=int, default=2400, help="after which all of it ends")
    parser.add_argument("--build", type=Path, help="a folder with both packages")
    parser.add_argument("example", nargs="*", help="options of examples/diloco.py, behind --")
    options = parser.parse_args()
    if options.emulator is None:
        print("nothing is measured without --emulator")
        return
    cores = sorted(os.sched_getaffinity(0))
    paths = ([str(options.build)] if options.build else []) + sys.path[1:]
    shared = {"PYTHONPATH": os.pathsep.join(paths), "QUICOLL_CONGESTION": "bbr", "OMP_NUM_THREADS": "1"}

    def bound(place: int, *command: object) -> list[object]:
        return ["taskset", "-c", cores[place * len(cores) // RANKS], sys.executable, *command]

    wanem = load_emulator(options.emulator)
    with (
        tempfile.TemporaryDirectory() as temporary,
        wanem.Wan(RANKS, options.profile, prefix=f"d{os.getpid() % 1_000_000}d", seconds=options.seconds) as wan,
    ):
        os.sched_setaffinity(wan.p.pid, {cores[-1]})
        certs = Path(temporary)
        create_authority(certs, job=JOB, days=1)
        issue(certs, role="coordinator", node="coordinator", days=1)
        address = f"{wan.addr(0)}:{PORT}"
        named = ["--listen", address, "--world-size", RANKS, "--job", JOB, "--certs", certs, "--seed", 7]
        command = bound(0, "-m", "quicoll.cli.main", "coordinator", *named, "--journal", certs / "journal.sqlite")
        wan.popen(0, command, shared, stdout=subprocess.DEVNULL)
        ranks, began = [], time.monotonic()
        for number in range(RANKS):
            issue(certs, role="worker", node=f"worker-{number}", days=1)
            environment = {
                **shared,
                "QUICOLL_JOB": JOB,
                "QUICOLL_CERTS": certs,
                "QUICOLL_COORDINATOR": address,
                "QUICOLL_NODE": f"worker-{number}",
                "QUICOLL_LISTEN": f"{wan.addr(number)}:0",
            }
            with (certs / f"{number}.log").open("wb") as log:
                command = bound(number, EXAMPLE, *options.example)
                ranks.append(wan.popen(number, command, environment, stdout=log, stderr=log))
        ended = [each.wait(options.seconds) for each in ranks]
        took = time.monotonic() - began
        for number in range(RANKS):
            print(f"rank of host {number}:")
            for line in (certs / f"{number}.log").read_text().splitlines()[-TOLD:]:
                print(f"    {line}")
        print(f"{took:.0f} s; the emulator says: {wan.cmd('stats')[0]}")
        if any(ended):
            raise SystemExit(f"ranks ended with {ended}")


if __name__ == "__main__":
    main()
