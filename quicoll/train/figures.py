"""Where the time of one worker goes: what a step takes, what of it is waiting for others, samples a second.

Sums over this worker's committed steps, from its own clock. A step begins when it is entered, and ends when it is
committed and applied; or, where it overlaps with the next, when that is entered, whose communication the wait for the
decision is then:

    data            in the sampler, or waiting for the feed's loader
    communication   entering the step, waiting for reductions and barriers, and the vote
    the rest        forward, backward, the update, and putting gradients into buckets

Waiting for a slower rank counts as communication: it is what this worker would save with faster others. The time of
attempts that were not committed is counted apart, as lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["StepTimes", "WorkerFigures"]


@dataclass(slots=True)
class StepTimes:
    """The seconds of one attempt at a step. samples: of the step on all ranks; 0 where the worker has no data."""

    seconds: float = 0.0
    data: float = 0.0
    communication: float = 0.0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """See the module's head.

    Attributes:
        steps: Committed steps that this worker took part in.
        aborted: Attempts that were not committed.
        samples: Of the committed steps, on all ranks; 0 where the worker has no data.
        seconds: Of the committed steps.
        data_seconds: Of these, for data.
        communication_seconds: Of these, for communication.
        lost_seconds: Of the attempts that were not committed.
    """

    steps: int = 0
    aborted: int = 0
    samples: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    communication_seconds: float = 0.0
    lost_seconds: float = 0.0

    def committed(self, times: StepTimes) -> WorkerFigures:
        """Return the figures with one more committed step."""
        return replace(
            self,
            steps=self.steps + 1,
            samples=self.samples + times.samples,
            seconds=self.seconds + times.seconds,
            data_seconds=self.data_seconds + times.data,
            communication_seconds=self.communication_seconds + times.communication,
        )

    def lost(self, times: StepTimes) -> WorkerFigures:
        """Return the figures with one more attempt that was not committed."""
        return replace(self, aborted=self.aborted + 1, lost_seconds=self.lost_seconds + times.seconds)

    def since(self, before: WorkerFigures) -> WorkerFigures:
        """Return what has come since earlier figures of the same worker."""
        return WorkerFigures(
            steps=self.steps - before.steps,
            aborted=self.aborted - before.aborted,
            samples=self.samples - before.samples,
            seconds=self.seconds - before.seconds,
            data_seconds=self.data_seconds - before.data_seconds,
            communication_seconds=self.communication_seconds - before.communication_seconds,
            lost_seconds=self.lost_seconds - before.lost_seconds,
        )

    @property
    def step_seconds(self) -> float:
        """The mean of a committed step; 0.0 before the first."""
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def communication_share(self) -> float:
        """The share of the steps' time that is communication, 0 to 1."""
        return self.communication_seconds / self.seconds if self.seconds else 0.0

    @property
    def data_share(self) -> float:
        """The share of the steps' time that is waiting for data, 0 to 1."""
        return self.data_seconds / self.seconds if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together, over all time in steps, lost attempts included."""
        total = self.seconds + self.lost_seconds
        return self.samples / total if total else 0.0
