"""Examples of every command: at the end of its `--help`, and in docs/commands.md.

tests/unit/cli/test_examples.py holds that each command has some, and that the parser takes each of them.
"""

from __future__ import annotations

from typing import Any

__all__ = ["EXAMPLES", "add_examples"]

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": (
        "quicoll demo",
        "quicoll demo --workers 3 --steps 60 --plot demo.svg",
        "quicoll demo --no-faults --json -",
    ),
    "run": (
        "quicoll run -n 4 train.py --epochs 3",
        "quicoll run -n 2 -m package.train",
        "quicoll run -n 4 --spares 1 --flight flights --json run.json train.py",
        "quicoll run -n 2 -- ./program --its-own options",
    ),
    "coordinator": (
        "quicoll coordinator --job alpha --certs certs --world-size 4 --journal alpha.db --listen 10.0.0.1:4433",
        "quicoll coordinator --job alpha --certs certs --world-size 4 --journal postgresql://db/alpha --lease 5",
    ),
    "relay": ("quicoll relay --job alpha --certs certs --listen 192.0.2.7:4434",),
    "scale": (
        "quicoll scale 8",
        "quicoll scale --leave worker-3",
        "quicoll scale 6 --coordinator 10.0.0.1:4433 --certs certs --no-wait --json",
    ),
    "status": (
        "quicoll status",
        "quicoll status --coordinator 10.0.0.1:4433 --certs certs --json",
    ),
    "top": (
        "quicoll top",
        "quicoll top --once",
        "quicoll top --http 8080",
        "quicoll top --coordinator 10.0.0.1:4433 --certs certs",
    ),
    "bench transfer": ("quicoll bench transfer --vs aioquic",),
    "bench allreduce": (
        "quicoll bench allreduce --vs gloo",
        "quicoll bench allreduce -n 4 --sizes 64KiB,16MiB --plot allreduce.svg",
        "quicoll bench allreduce -n 4 --sizes 64MiB --vs gloo --lent",
    ),
    "bench sharded": ("quicoll bench sharded --vs gloo",),
    "bench latency": ("quicoll bench latency --vs gloo",),
    "bench step": ("quicoll bench step --json step.json",),
    "bench wan": (
        "quicoll bench wan --profiles wan,badwan --plot wan.svg",
        "quicoll bench wan --link '200mbit 50ms 0.1%' --mib 4,16 --seeds 3",
        "quicoll bench wan --emulator ../shared/wanem/wanem.py --profiles wan --congestion bbr",
    ),
    "env": (
        "quicoll env",
        "quicoll env --json",
    ),
    "doctor": (
        "quicoll doctor",
        "quicoll doctor --coordinator 10.0.0.1:4433 --certs certs --job alpha --node worker-0",
        "quicoll doctor --answer 60",
        "quicoll doctor --peer 10.0.0.2:7777",
    ),
    "explain": (
        "quicoll explain all_reduce",
        "quicoll explain all_reduce --ranks 6 --sites 3,3 --bytes 1MiB --plot plan.svg",
        "quicoll explain all_reduce --ranks 8 --bytes 64MiB --algorithm ring --full",
        "quicoll explain all_gather --ranks 8 --json",
    ),
    "sim": (
        "quicoll sim --seeds 0:500",
        "quicoll sim --seed 17 --explain",
        "quicoll sim --seed 17 --trace run.json",
        "quicoll sim --seed 3 --events 'sim.at(1.2).crash(3)' --explain",
    ),
    "audit diff": ("quicoll audit diff first/worker-0.jsonl second/worker-0.jsonl",),
    "audit show": ("quicoll audit show run/worker-0.jsonl",),
    "audit verify": ("quicoll audit verify run --ca certs/ca.pem",),
    "trace": ("quicoll trace traces run.json",),
    "post-mortem": ("quicoll post-mortem flights",),
    "certs init": ("quicoll certs init certs --job alpha",),
    "certs issue": (
        "quicoll certs issue certs --role coordinator --node coordinator",
        "quicoll certs issue certs --role worker --node worker-0 --days 30",
    ),
    "certs show": ("quicoll certs show certs/ca.pem", "quicoll certs show certs/worker-worker-0.pem --json"),
}
"""By command. Each is a line that a shell takes."""


def add_examples(command: Any, path: str) -> None:
    """Give a command its examples, and those of the commands in it theirs.

    Args:
        command: As typer has made it.
        path: Its name, after those of the commands that it is in.
    """
    for name, inner in getattr(command, "commands", {}).items():
        add_examples(inner, f"{path} {name}")
    if path in EXAMPLES:
        # Help is broken anew into lines; paragraphs stay apart.
        command.epilog = "\n\n".join(["Examples:", *(f"  {line}" for line in EXAMPLES[path])])
