"""What a second worker brings: the digits task, same shards and same bits, on one worker and on two.

    python benchmarks/speedup.py [--steps 60] [--batch 96 384] [--repeats 3] [--json FILE]

Each worker computes with one thread, so two workers have twice the cores; with fewer than two free cores the ratio says
nothing. One and two workers take turns, so that a slow minute of the machine hits both, and the best run of each is
compared: everything that can disturb a run makes it slower. Time is that of the steps, without starting and joining.
The limit is 2 less what a step needs besides computing: one all-reduce of the bucket, the votes, one fsync. So the more
a step computes, the closer it comes: --batch samples for each of the 8 shards, a report for each.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

from quicoll.launch.supervisor import Supervisor


def train(workers: int, steps: int, batch: int) -> dict[str, object]:
    """One run; the slowest worker's result."""
    with tempfile.TemporaryDirectory(prefix="quicoll-bench-") as directory:
        command = [sys.executable, "-m", "quicoll.demo.worker", "--steps", str(steps)]
        command += ["--batch", str(batch), "--result", directory]
        outcome = asyncio.run(Supervisor(command, workers=workers, job="speedup", output=lambda node, line: None).run())
        if outcome.exit_status:
            sys.exit(outcome.reason)
        results = [json.loads(path.read_text()) for path in Path(directory).glob("worker-*.json")]
    return max(results, key=lambda result: result["train_s"])


def compare(steps: int, batch: int, repeats: int) -> dict[str, object]:
    """The report for one batch size."""
    runs: dict[int, list[dict[str, object]]] = {1: [], 2: []}
    for _ in range(repeats):
        for workers, results in runs.items():
            results.append(train(workers, steps, batch))
    assert len({result["digest"] for results in runs.values() for result in results}) == 1, "bits depend on the world"
    seconds = {workers: min(float(str(result["train_s"])) for result in results) for workers, results in runs.items()}
    return {
        "batch": batch,
        "speedup": round(seconds[1] / seconds[2], 3),
        "step_ms": {str(workers): round(best / steps * 1e3, 2) for workers, best in seconds.items()},
        "runs_s": {str(workers): [result["train_s"] for result in results] for workers, results in runs.items()},
        "steps": steps,
        "digest": runs[1][0]["digest"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, nargs="+", default=[96, 384])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = {
        "reports": [compare(options.steps, batch, options.repeats) for batch in options.batch],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}",
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
