"""Audits written by hand: what ranks would have noted, without ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quicoll.audit.log import AuditLog, OperationRecord, audit_file

SUM, GATHER = "all_reduce float32 (3) sum default", "scatter float32 (3)"


def record(step: int | None, rank: int, **fields: Any) -> OperationRecord:
    defaults: dict[str, Any] = {
        "view": 1,
        "world": 2,
        "group": "world",
        "seq": 0,
        "op": SUM,
        "inputs": ((rank, f"in{step}.{rank}"),),
        "result": f"out{step}",
        "agreed": True,
    }
    return OperationRecord(step=step, rank=rank, **{**defaults, **fields})


class Scripted:
    """Writes a run: for each rank a file; `change` may replace a record before it is written."""

    def __init__(self, directory: Path, *, world: int = 2, leaves: int = 4) -> None:
        self.directory, self.world, self.leaves = directory, world, leaves
        self.logs = [
            AuditLog(audit_file(directory, f"worker-{rank}"), job="test", node=f"worker-{rank}")
            for rank in range(world)
        ]

    def step(self, step: int, *, view: int = 1, change: Any = lambda record: record) -> None:
        for rank, log in enumerate(self.logs):
            log.begin(step=step, view=view, rank=rank, world=self.world)
            mine = range(rank * self.leaves // self.world, (rank + 1) * self.leaves // self.world)
            for seq in range(2):
                inputs = tuple((leaf, f"in{step}.{seq}.{leaf}") for leaf in mine)
                written = change(
                    record(step, rank, view=view, world=self.world, seq=seq, inputs=inputs, result=f"out{step}.{seq}")
                )
                if written is not None:
                    log.record(written)

    def close(self) -> None:
        for log in self.logs:
            log.close()


def script(directory: Path, *, world: int = 2, steps: int = 3, change: Any = lambda record: record) -> Path:
    run = Scripted(directory, world=world)
    for step in range(1, steps + 1):
        run.step(step, change=change)
    run.close()
    return directory


def changed(step: int, seq: int, rank: int | None, **fields: Any) -> Any:
    def change(item: OperationRecord) -> OperationRecord:
        if (item.step, item.seq) == (step, seq) and rank in (None, item.rank):
            values = {name: getattr(item, name) for name in item.__struct_fields__}
            return OperationRecord(**{**values, **fields})
        return item

    return change


def wrote(directory: Path, ranks: Mapping[int, Sequence[OperationRecord]], *, world: int = 2, step: int = 1) -> Path:
    """A run of one step in view 1, in which each rank has noted these."""
    for rank, records in ranks.items():
        log = AuditLog(audit_file(directory, f"worker-{rank}"), job="test", node=f"worker-{rank}")
        log.begin(step=step, view=1, rank=rank, world=world)
        for item in records:
            log.record(item)
        log.close()
    return directory
