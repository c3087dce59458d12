"""DiLoCo: workers train by themselves for many steps, and exchange how far they have come (arXiv 2311.08105), also in
fragments and while they compute (Streaming DiLoCo, arXiv 2501.18512). Each round is one atomic step of the job.

    round       for each logical worker: `every` inner steps of the inner optimizer, on its own samples, nothing sent;
                or, in `parts`, their gradients reduced inside of a site (quicoll.train.diloco_sites)
    turn        of a fragment (quicoll.train.diloco_turns): the pseudo-gradients of all logical workers, the job's
                parameters less the worker's, are averaged in canonical order; `delay` inner steps later, by number,
                the outer optimizer steps with the mean, and each worker goes on from its result
    stage       what each worker has of its own by then; while the last exchange is under way, unless that is mixed in
    commit      the job's parameters, the outer optimizer, every worker's own memory (quicoll.train.diloco_workers) and
                the data's position move together, on all ranks, or nothing does
    ahead       neither is waited for: as soon as a rank knows what the round will have come to if it is committed, it
                does the inner steps of the next one (quicoll.train.diloco_round), up to the first exchange of that. All
                of it is memory of an attempt, and nothing of it is sent: where the round is aborted it is thrown away

It is a `Worker` whose step is a round: resuming, checkpoints, SIGTERM, the check that all train the same thing and
`run` are the worker's (quicoll.train.worker). A function of one's own for the loss, and not a loop: a rank computes the
inner steps of several logical workers in turn, begins exchanges between two of them, and computes all of it again where
a round is aborted. So the loop is the library's, and what stands in it is the user's.

States of a round, on a rank:

    ahead --the one before is committed--> open     it begins for all ranks: what it has done so far stands
    ahead --it is not, or the view ends--> aborted  nothing was sent
    open --turns--> ended --staged, voted--> left   the next one is ahead from `ended` on; of the last round this waits
    left --committed-------------> committed        all of the above has moved
    left, open --StepAborted-----> aborted          nothing has; the round is computed again from the committed state,
                                                    with the ranks that there are then
    left --Partitioned-----------> in doubt         either of them, found out when this rank is heard again

Invariants.
1. What a round computes is a function of the committed state, the number of the round, the samples, and what the
   journal says of it, which is nothing in most rounds. A logical worker is one leaf of the outer reductions, a part of
   it one of the inner, on whichever rank they are, so the bits are those of one rank with all logical workers.
2. An attempt works in copies. The module and the optimizers hold what is committed whenever anything is awaited.
3. A result is applied after inner step number begin + delay, whenever it arrived: one that is late is waited for there.
4. What a wire format loses stays in the worker's residual, if it is to, and is sent with its next exchange. Residuals
   are of the attempt until it is committed, so an aborted one loses and repeats nothing.
5. Every rank issues the same collectives in a round, also one that has no logical worker; in the group of its site
   and in those of its lanes the same as the others there. The first is issued when the round is open: how many inner
   steps a rank has done ahead of that, by its clock, changes neither their order nor their results. With `parts` each
   inner step has one, so there is none ahead; nor where an exchange begins with the round.
6. The ranks of a site hold the same bits of the site's workers. Each computes all of a step but gradients; what they
   have come to is compared when it is staged.

Failures.
- A rank is lost: its logical workers are computed by others from then on. What they had of their own comes from the
  ranks that keep a copy (`backup`), and the bits are as if nothing had happened. Where none has one, the workers begin
  anew, from the job's parameters: that costs what an inner optimizer's moments and a residual are worth, and no bytes
  in any round. All ranks know of it, and it is in the journal (quicoll.train.diloco_journal): by it the bits are those
  of a job in which no rank was lost.
- A rank of a site with several is lost, and the workers are computed in parts: the others of the site have all of them.
  No bit changes, nothing is copied for it. A whole site is lost: as above, its workers are computed at other sites.
- A rank is slow: the others wait where its pseudo-gradients are needed, `delay` inner steps after they were due; with a
  `quorum` until the grace is over (quicoll.train.diloco_quorum).
- A loss that is no number: it spreads as in any training. Nothing looks for it.
- The round takes longer than the setting `timeout` on one rank than on another: the collectives of the faster ones end
  with PeerError. It has to be longer than the longest difference between ranks in a round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from math import fsum
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.checks import whole
from quicoll.errors import LocalError
from quicoll.numerics.buffers import source
from quicoll.numerics.bundle import Bundle
from quicoll.numerics.dtypes import FLOAT32
from quicoll.numerics.encoding import Encoding, encoding_for
from quicoll.numerics.feedback import ErrorFeedback
from quicoll.numerics.reduce import ReduceOp
from quicoll.state.sharded import Sharded, layout_in
from quicoll.train.diloco_inner import InnerSteps
from quicoll.train.diloco_journal import RoundJournal
from quicoll.train.diloco_lanes import SiteLanes
from quicoll.train.diloco_quorum import demand_quorum, stretches_of
from quicoll.train.diloco_round import RoundEnd, RoundWork
from quicoll.train.diloco_sites import WorkerHome
from quicoll.train.diloco_stretches import Stretches
from quicoll.train.diloco_task import RoundsTask
from quicoll.train.diloco_turns import cut_fragments, turns_of
from quicoll.train.diloco_workers import LogicalWorker, WorkerRows, kept_by, step_apart
from quicoll.train.divided import PieceArchive
from quicoll.train.worker import Worker

if TYPE_CHECKING:
    import torch

    from quicoll.checkpoint.parts import Shard
    from quicoll.data.feed import Feed
    from quicoll.data.sampler import Sampler
    from quicoll.job import Job
    from quicoll.membership.view import View
    from quicoll.numerics.codecs import WireFormat
    from quicoll.plan.schedule import AlgorithmName
    from quicoll.step.context import Step
    from quicoll.train.diloco_journal import RoundEntry
    from quicoll.train.diloco_lanes import FragmentUnderWay
    from quicoll.train.diloco_quorum import Counts
    from quicoll.train.diloco_workers import State
    from quicoll.train.figures import StepTimes
    from quicoll.train.saver import CheckpointPolicy
    from quicoll.train.task import Part
    from quicoll.train.worker import OnStep

__all__ = ["DiLoCo"]


_NAME, _PREFIX, _PIECE = "workers", "workers.", "row"


class DiLoCo(Worker):
    """Trains a torch module by rounds of inner steps. See the module's head; every rank makes an equal one.

        diloco = quicoll.train.DiLoCo(
            job,
            model,
            torch.optim.AdamW(model.parameters(), lr=4e-4),
            torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True),
            lambda model, part: functional.cross_entropy(model(part.samples[0]), part.samples[1]),
            data=feed,
            every=100,
        )
        result = await diloco.run(steps=50)  # rounds

    A step of this worker, of its checkpoints and of `run(steps=...)` is a round. Between rounds the model has the job's
    parameters.

    Attributes:
        architecture: As a `Worker`'s.
        figures: As a `Worker`'s, by rounds.
        loss: The mean loss of the inner steps of the last committed round, over all logical workers; the same bits on
            all ranks. NaN before the first.
    """

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer,
        loss: Callable[[torch.nn.Module, Part], torch.Tensor],
        *,
        data: Sampler | Feed | None = None,
        shards: int | None = None,
        parts: int = 1,
        every: int = 100,
        fragments: int = 8,
        delay: int = 5,
        mix: float | None = None,
        wire: WireFormat | None = None,
        feedback: bool | float = True,
        keep_inner: bool = True,
        quorum: int | None = None,
        grace: float = 0.0,
        backup: int = 0,
        replay: str | None = None,
        schedule: Callable[[int], float] | None = None,
        checkpoints: CheckpointPolicy | None = None,
        on_step: OnStep | None = None,
        on_inner_step: OnStep | None = None,
        algorithm: AlgorithmName = "auto",
        report_every: int = 0,
    ) -> None:
        """Say what is trained. Nothing is sent yet.

        Args:
            job: A joined job.
            model: What is trained, in float32. Without layers that keep running statistics.
            inner: The optimizer of the inner steps, of all parameters that require a gradient. Each logical worker has
                its state for itself. To clip gradients, give it a hook (`register_step_pre_hook`).
            outer: The optimizer of the job's parameters, which gets the mean pseudo-gradient as their gradient: the
                paper's is SGD with lr=0.7, momentum=0.9 and nesterov=True. Of the same parameters.
            loss: Gives the mean loss over the samples of a part, a scalar, as for `TorchTask`. `part.step` is the
                number of the inner step, from 1 over all rounds; `part.shard` is the logical shard.
            data: Which samples each logical shard has in an inner step, or a feed with the samples too. None: the loss
                finds them by `part.shard` and `part.step`.
            shards: The logical shards, the same for the whole job: each is a logical worker, or one of the `parts` of
                one. The bits depend on them and not on the ranks. Of the data where there is some. There are at least
                as many logical workers as there will ever be ranks; with `parts`, as there will ever be sites.
            parts: 1: a logical worker is computed by one rank. More: into so many logical shards the samples of its
                inner steps are divided, and all ranks of a site (`site=` of `quicoll.join`) compute its workers
                together: data parallel inside, DiLoCo across. At least as many as a site will have ranks.
            every: Inner steps of a round.
            fragments: Into how many runs of whole parameters the model is cut; each is exchanged in its turn. 1: all at
                once.
            delay: Inner steps that go on while a fragment is exchanged, before its result is applied; 0: none.
            mix: How much of a worker's own parameters stays when a result is applied after a delay, 0 to 1: own * mix +
                job's * (1 - mix). None: 0.5 with a delay; without one a worker takes the job's.
            wire: What pseudo-gradients travel as, as in `Group.all_reduce`; None: float32.
            feedback: Whether what the wire format loses is kept, and sent with the worker's next exchange; or how much
                of it is, 0 to 1. With top-k 0.95: what waits for long is of parameters that all have moved on from
                (SparseLoCo, arXiv 2508.15706).
            keep_inner: Whether a worker's inner optimizer keeps its state from round to round; False: it begins each
                round as it was made, and there is nothing of it to keep a copy of.
            quorum: Of so many logical workers; a rank that is slower than these stops where it is, `grace` after it has
                heard of them, and its workers count with what they have done. None: all are waited for.
            grace: Seconds, from when a rank has heard that a quorum has come to an exchange until it stops.
            backup: How many further ranks keep a copy of what each logical worker has of its own; with `parts`, how
                many further sites. 0: none; the workers of a rank that is lost, or of a site with all its ranks, begin
                anew, which the journal says. With 1, the loss of one rank, or site, loses nothing, and each round costs
                the bytes of that copy: four to sixteen for each parameter.
            replay: The journal of another job (`journal`), whose bits this one is to have. None: what happens, happens.
            schedule: By what the inner learning rates are multiplied in an inner step of this number: a function of the
                number alone.
            checkpoints: When they are written, in rounds; None: never, and none is looked for.
            on_step: Called with the round's number after each that this rank committed, as for a `Worker`. The next
                round has been entered then, and inner steps of it may be done: no step is begun in it, and `job.ready`
                not called.
            on_inner_step: Called with the inner step's number after each, also in a round that is aborted later, or
                that has not begun yet, and awaited if it returns an awaitable. It calls no collectives.
            algorithm: As in `Group.all_reduce`. Changes no bits.
            report_every: An event "progress" comes after each so many rounds; 0: none.
        Raises:
            LocalError: An argument is invalid, or the model or an optimizer cannot be trained so; says why.
        """
        turns = turns_of(every, fragments, delay)
        if mix is not None and not (delay and 0.0 <= mix <= 1.0):
            raise LocalError(f"mix is 0 to 1, and needs a delay: mix={mix}, delay={delay}")
        if not 0.0 <= feedback <= 1.0:
            raise LocalError(f"feedback is True, False, or 0 to 1, not {feedback}")
        if backup < 0 or whole(parts, "parts") < 1:
            raise LocalError(f"backup is 0 or more, and parts 1 or more, not {backup} and {parts}")
        task = RoundsTask(
            model,
            outer,
            loss,
            inner=inner,
            parts=parts,
            every=every,
            fragments=fragments,
            delay=delay,
            mix=mix,
            wire=wire,
            feedback=float(feedback) if wire is not None else 0.0,
            keep_inner=keep_inner,
            quorum=quorum,
            grace=grace,
            replay=replay,
        )
        super().__init__(
            job, task, data=data, shards=shards, checkpoints=checkpoints, on_step=on_step, algorithm=algorithm,
            report_every=report_every,
        )  # fmt: skip
        trained = [each for each in model.parameters() if each.requires_grad]
        if len(task.parameters()) > len(trained):
            moved = ", ".join(list(task.parameters())[len(trained) :])
            raise LocalError(f"each logical worker would move {moved} by itself: train a model without such buffers")
        if self._shards % parts:
            raise LocalError(f"each logical worker has {parts} of the shards, which {self._shards} are no multiple of")
        self._workers, self._per_worker = self._shards // parts, parts
        demand_quorum(quorum, grace, self._workers)
        stretches = stretches_of(turns, every)
        replayed = None if replay is None else RoundJournal.parse(replay)
        if replayed is not None:
            replayed.demand(self._workers, stretches)
        cuts = cut_fragments([each.numel() for each in trained], fragments)
        kept = kept_by(inner, trained)
        kept_by(outer, trained)
        # After the last turn of a round nothing has moved a worker's parameters away from the job's, unless it mixes.
        mix = (0.5 if delay else 0.0) if mix is None else mix
        carried = [number for cut in (cuts if mix else cuts[:-1]) for number in cut]
        sizes = [sum(trained[number].numel() for number in cut) for cut in cuts]
        self._trainer = task
        self._outer = outer
        self._parameters: list[torch.nn.Parameter] = trained
        self._inner_steps = InnerSteps(
            job, task, inner, trained, data=self._data, shards=self._shards, parts=parts, every=every,
            schedule=schedule, on_inner_step=on_inner_step,
        )  # fmt: skip
        self._every, self._turns, self._mix, self._fragments = every, turns, mix, cuts
        self._wire = wire
        self._form: Encoding | None = None if wire is None else encoding_for(wire, FLOAT32, ReduceOp.AVG, "default")
        self._feedback = float(feedback) if wire is not None else 0.0
        self._keep_inner = keep_inner
        self._quorum, self._grace = quorum, grace
        self._stretches, self._replayed = stretches, replayed
        self._rows = WorkerRows(
            trained, carried, kept if keep_inner else [{} for _ in kept], sizes if self._feedback else []
        )
        self._own = Sharded(
            self._workers * self._rows.length, {_PIECE: "float32"}, blocks=self._workers, backup=backup,
            read=self._read, renew=True, by_site=parts > 1, torch=True,
        )  # fmt: skip
        directory = None if checkpoints is None else checkpoints.directory
        self._archive = self._own.index = PieceArchive(_PREFIX, directory, "torch")
        self._groups: tuple[int, SiteLanes] | None = None  # of a view
        self._ahead: RoundWork | None = None  # the round after the one that was left, or is about to be
        self.loss = float("nan")

    def _sharded(self) -> Mapping[str, Sharded]:
        return {_NAME: self._own}

    def _sharded_parts(self) -> Mapping[str, Shard]:
        return self._archive.parts(self._own)

    def _read(self, step: int, name: str, start: int, stop: int) -> Any:
        return self._archive.read(self._own, step, name, start, stop)

    @property
    def journal(self) -> str:
        """What happened in the committed rounds that is neither in the recipe nor in the samples; empty: nothing.

        It is the same on all ranks. `replay=` takes it.
        """
        return self._trainer.journal.text

    def _done_before(self, number: int) -> Counts | None:
        """What each worker did in the round before."""
        if number == 1:
            return None
        said = self._trainer.journal.of_round(number - 1).done
        return said or [[len(stretch)] * self._workers for stretch in self._stretches]

    def _overlaps(self) -> bool:
        """Whether another round follows, whose first inner steps can be done ahead of the decision on this one."""
        if self._per_worker > 1 or not self._turns[0].at:
            return False
        ahead = self._ahead
        if self._steps is not None:
            return (self._job.committed_step + 1 if ahead is None else ahead.number) < self._steps
        if self._sampler is None or self._epochs is None:
            raise AssertionError("epochs are of data")
        position, done = self._sampler.position, 0
        if ahead is not None and ahead.position is not None:
            position, done = ahead.position, ahead.done
        for _ in range(done, self._every):
            position = self._sampler.after(position)
        return position.epoch < self._epochs

    def _start_over(self) -> None:
        self._ahead = None

    # -- a round -------------------------------------------------------------------------------------------------------

    async def _update(self, step: Step, times: StepTimes) -> Callable[[], None]:
        """Compute a round; return what is left for the commit."""
        clock = asyncio.get_running_loop().time
        work, self._ahead = self._ahead, None
        if work is None:
            await self._begin(step, times)
            position = None if self._sampler is None else self._sampler.position
            work = self._opened(step.view, step.number, RoundEnd(self._own[_PIECE], self._parameters, position))
            self._start(work)
        values: list[torch.Tensor] = list(self._parameters)  # of the job, as this round leaves them
        states: dict[int, State] = {}
        under_way: dict[int, FragmentUnderWay] = {}
        staged: tuple[torch.Tensor, asyncio.Task[tuple[float, RoundEntry]]] | None = None
        try:
            for turn in self._turns:
                while work.done < turn.at or not work.started:
                    if not work.started and (step.decided or work.done == turn.at):
                        await self._begin(step, times)
                        self._start(work)
                        continue
                    await self._inner_steps.do(work, times)
                if turn.begins:
                    work.said.close()
                    under_way[turn.fragment] = self._exchange(work, turn.fragment)
                    continue
                if work.done == self._every:
                    work.said.close()  # the last stretch, which ends with the round
                    if not self._mix:
                        # No row depends on what the last exchange comes to: it is not waited for.
                        staged = self._stage(step, work)
                began = clock()
                mean = await work.lanes.whole(under_way.pop(turn.fragment))
                factor = await work.said.factor(turn.fragment)
                if factor != 1.0:
                    mean = mean * factor
                times.communication += clock() - began
                self._apply(turn.fragment, mean, work.workers, values, states)
            staged = staged or self._stage(step, work)
            rows, ended = staged
            if self._overlap:
                ahead = self._opened(step.view, step.number + 1, RoundEnd(rows, values, work.position))
                while not ended.done() and ahead.done < self._turns[0].at:
                    await self._inner_steps.do(ahead, times)
                self._ahead = ahead
            began = clock()
            loss, happened = await ended
            times.communication += clock() - began
        except BaseException:
            self._ahead = None
            if staged is not None:
                staged[1].cancel()
                await asyncio.gather(staged[1], return_exceptions=True)
            raise
        times.samples = work.samples
        if self._sampler is not None and work.position is not None:
            self._sampler.advance(step, work.position)
        return lambda: self._commit(values, states, loss, happened)

    def _opened(self, view: View | None, number: int, before: RoundEnd) -> RoundWork:
        """Return a round of which nothing is done yet. number: its own. before: what the round before has come to."""
        lanes, length = self._lanes_in(view), self._rows.length
        entry = None if self._replayed is None else self._replayed.of_round(number)
        workers = []
        for place, shard in enumerate(lanes.home.workers):
            row = before.rows[place * length : (place + 1) * length]
            if entry is not None and shard in entry.anew:
                row = row.new_zeros(length)
            workers.append(self._rows.worker(shard, row, before.values))
        said = Stretches(
            self._job.group,
            lanes.home,
            self._stretches,
            number=number,
            quorum=self._quorum,
            grace=self._grace,
            anew=[not worker.begun for worker in workers],
            replayed=entry,
        )
        return RoundWork(number, lanes, workers, said, before.position)

    def _start(self, work: RoundWork) -> None:
        """Let the other ranks hear of a round: its step has begun."""
        work.said.start(self._done_before(work.number))
        work.started = True

    def _stage(self, step: Step, work: RoundWork) -> tuple[torch.Tensor, asyncio.Task[tuple[float, RoundEntry]]]:
        """Begin what ends a round; return the rows of the workers here, and a task for its loss and what happened.

        That tells all ranks the losses, and what the workers have become.
        """
        home, workers, length = work.lanes.home, work.workers, self._rows.length
        losses = [float(worker.loss) / max(worker.steps, 1) for worker in workers] if home.speaks else []
        told = self._job.group.all_gather(np.array(losses, np.float32), counts=home.spoken)
        rows = self._own[_PIECE].new_empty(len(workers) * length)
        for place, worker in enumerate(workers):
            if not self._keep_inner:
                worker.state = None
            self._rows.write(worker, rows[place * length : (place + 1) * length])

        async def ended() -> tuple[float, RoundEntry]:
            await self._own.stage(step, {_PIECE: rows})
            happened = await work.said.settle()
            counted = sum(map(any, zip(*happened.done, strict=True))) if happened.done else self._workers
            return fsum(np.asarray(await told).tolist()) / max(counted, 1), happened

        return rows, asyncio.ensure_future(ended())

    def _lanes_in(self, view: View | None) -> SiteLanes:
        """The groups of the view in which a step runs."""
        group = self._job.group
        if view is None:
            raise AssertionError("a round is computed inside of its step")
        if self._groups is None or self._groups[0] != view.view_id:
            home = WorkerHome.of(layout_in(view, self._own.pieces.spec), group.rank, self._per_worker)
            self._groups = view.view_id, SiteLanes(group, home, parts=self._per_worker, algorithm=self._algorithm)
        return self._groups[1]

    def _exchange(self, work: RoundWork, fragment: int) -> FragmentUnderWay:
        """Begin to average the pseudo-gradients of a fragment, by the workers' shares, one flat tensor for each."""
        import torch

        workers = work.workers
        shares = [work.said.share(place, fragment) for place in range(len(workers))]
        places = self._fragments[fragment]
        flats = [
            torch.cat([(self._parameters[n].detach() - worker.values[n]).reshape(-1) for n in places]).cpu()
            for worker in workers
        ]
        for flat, share in zip(flats, shares, strict=True):
            if share != 1.0:
                flat.mul_(share)
        if self._form is not None and self._feedback and workers:
            # What `all_reduce(residual=...)` does when the step is committed, but now: a residual is part of a row, and
            # rows are staged, and copied to other ranks, before the vote.
            for worker in workers:
                worker.residuals[fragment].mul_(self._feedback)
            feedback = ErrorFeedback(
                [worker.residuals[fragment] for worker in workers],
                [Bundle.of(source(flat)) for flat in flats],
                self._form,
                apart_from=flats,
            )
            feedback.encode()
            flats = [torch.from_numpy(feedback.sums(place)[0]) for place in range(len(workers))]
            feedback.commit()
        like = torch.empty(sum(self._parameters[n].numel() for n in places))
        return work.lanes.begin(flats, like, self._wire, 1 if self._form is None else self._form.codec.block)

    def _apply(
        self,
        fragment: int,
        mean: torch.Tensor,
        workers: Sequence[LogicalWorker],
        values: list[Any],
        states: dict[int, State],
    ) -> None:
        """Let the outer optimizer step a fragment, apart from what is committed, and the workers go on from there."""
        import torch

        places = self._fragments[fragment]
        parameters = [self._parameters[number] for number in places]
        sizes = [each.numel() for each in parameters]
        flats = zip(torch.split(mean, sizes), parameters, strict=True)
        gradients = [flat.view_as(each).to(each.device) for flat, each in flats]
        new, kept = step_apart(self._outer, parameters, gradients)
        with torch.no_grad():
            for number, value, state in zip(places, new, kept, strict=True):
                values[number], states[number] = value, state
                for worker in workers:
                    own = worker.values[number]
                    if self._mix:
                        own.mul_(self._mix).add_(value * (1.0 - self._mix))
                    else:
                        own.copy_(value)

    def _commit(
        self, values: Sequence[torch.Tensor], states: Mapping[int, State], loss: float, happened: RoundEntry
    ) -> None:
        """Take what the round has come to."""
        import torch

        with torch.no_grad():
            for number, parameter in enumerate(self._parameters):
                parameter.copy_(values[number])
                if states[number]:
                    self._outer.state[parameter] = states[number]
        self._trainer.journal = self._trainer.journal.with_entry(happened)
        self.loss = loss
