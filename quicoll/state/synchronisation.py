"""Bring all ranks of a view to one state, before any step begins in it; compare their states later.

A rank's state has a version: the coordinator's number of the latest decision that it includes, and the number of the
last step. The step's number counts what the state has been through. It travels with the state (a checkpoint, or a
member's memory), while the coordinator numbers its decisions by itself; so a job that starts again from a checkpoint
goes on from the checkpoint's number.

Equal versions do not make equal states: seeds that were forgotten, two checkpoints of one step, a bit that flipped, a
buffer that a forward pass changed on one rank. So versions and digests of what save() gives are compared

    when a view begins          `synchronise`, before its first step
    beside a step               `StateCheck`, of the view's second step and every so many after it: told at a step's
                                entry, while no code of the user runs, looked at when the step is left, before the
                                vote; so the exchange takes no time of the step
    on demand                   `synchronise` again

and `quicoll.state.version.compare` says who gives to whom, or that nobody knows which state is right (Diverged).

    tell, heard     each rank's version and digests; and that all have heard the same   all ranks
    description     what their states are of; whose is another is refused here, before  all ranks
                    anything of a state moves (description.py)
    learners        a rank that is behind by a large state steps out, and learns it beside the steps of the others
                    before it is handed the rest (learning.py); it gets the manifest. This view ends by that. A spare
                    (`Member.spare`) does so always, whatever it holds, and has no say in what the others compare
    difference      the first line in which they differ, only where they do             all ranks
    manifest        from the giver: size, then skeleton and records; what it describes  to each receiver
                    has to have the digest that the holders have told
    transfer        the tensors, into the memory in which they end                      to the receivers
    together        nobody goes on before the tensors are there                         all ranks
    load            once, with the whole state; then save() has to give the giver's digest

Invariants: every rank computes the same from the same numbers, so no
rank waits for one that does not take part; a state with another digest than the giver's never counts as whole (a load
that forgets something would differ again at the next comparison, and be handed over again, for ever). Nor is a byte
of a state asked for whose description has another digest than its holders told all ranks: where there are two of them
or more, a giver that lies is found before anything is applied. One that alone holds a state is believed; then
`confirmed_by` is empty.

Failures. A rank lost on the way: PeerError, and the next view begins at the top. A transfer that broke leaves its
receiver torn (rank_state.py). Diverged: all ranks have what they need to raise it when the last row of
`first_difference` is there; none ends the view for it, so that every rank gets it, and leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quicoll.checks import done
from quicoll.errors import Corrupted, Diverged, LocalError, PeerError
from quicoll.numerics.buffers import detached, memory
from quicoll.state.chunks import ChunkedState
from quicoll.state.comparison import first_difference, heard, row, tell_all
from quicoll.state.description import described, misfits
from quicoll.state.learning import Lesson, teachers, who_learns
from quicoll.state.manifest import MAX_MANIFEST, decode_manifest, encode_manifest
from quicoll.state.transfer import chunks_of, opened, together, transfer
from quicoll.state.tree import described_digest, rebuild
from quicoll.state.version import StateVersion, compare

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.membership.view import View
    from quicoll.state.comparison import FirstDifference, Told
    from quicoll.state.learning import Teacher
    from quicoll.state.manifest import Manifest
    from quicoll.state.rank_state import RankState
    from quicoll.state.tree import FlatState, Line
    from quicoll.state.version import HeldState, StateComparison

__all__ = ["StateCheck", "Unequal", "ViewState", "synchronise"]


@dataclass(frozen=True, slots=True)
class Unequal:
    """States that differ at one version.

    ranks: whose are not the right one; all, where nobody knows which is. tensor: the path of the first line that
    differs. giver: who gives the right one to `ranks`; None where nobody knows it. text: all of it in words.
    """

    ranks: tuple[int, ...]
    tensor: str
    giver: int | None
    text: str


@dataclass(frozen=True, slots=True)
class ViewState:
    """What a comparison of all ranks' states has come to.

    digest: of the state that all ranks have now; b"" where this one registered none. check_every: committed steps from
    one comparison to the next, as all ranks have it. giver: the rank that gave this one its state, with `version`; None
    if it kept its own. before: the version that this rank had. unequal: None where all holders of the newest version
    held the same. confirmed_by: ranks but the giver that hold what it gave. learners: ranks that step out of the view,
    which ends with nothing of this done. lesson: what this rank has to learn, as one of them. registered: whether all
    ranks have registered a state.
    """

    digest: bytes
    version: StateVersion
    before: StateVersion
    check_every: int
    giver: int | None = None
    unequal: Unequal | None = None
    confirmed_by: tuple[int, ...] = ()
    learners: tuple[int, ...] = ()
    lesson: Lesson | None = None
    registered: bool = True


async def synchronise(
    state: RankState, group: Group, view: View, *, check_every: int, learn_from: int, teacher: Teacher
) -> ViewState:
    """Bring every rank of a view to the newest state that any of them holds, and to one state where these differ.

    Args:
        state: What this rank holds. Its version is brought up to date.
        group: All ranks of the view, with operations numbered apart from the user's.
        view: The view.
        check_every: This rank's setting.
        learn_from: This rank's setting `learn_from_bytes`.
        teacher: Takes the learners of this rank.
    Returns:
        What was found and done.
    Raises:
        Diverged: The ranks hold different states, and nobody knows which is right. Every rank raises it.
        LocalError: This rank's state is of something else than the job's; or this rank is behind and nothing can be
            handed to it, or what `save` returned is no state, or `load` does not do what it has to.
        PeerError: A rank was lost, or its state is of something else, or the giver sent a malformed manifest.
        Corrupted: A rank was told something else than the others, or has told what cannot be; or what the giver
            announced is not what the holders have told, or a tensor arrived with other bits than announced.
    """
    nodes, view_id = view.nodes, view.view_id
    mine = state.read()
    before = state.version
    rows = await tell_all(
        group, row(state, mine, check_every=check_every, learn_from=learn_from, pupils=teacher.pupils)
    )
    told = await heard(group, rows, nodes=nodes, view_id=view_id)
    _check_versions(told.held, max(view.committed_step, before.decision), nodes, view_id)
    workers = told.held[: view.workers]
    found = compare(workers, committed=view.committed_step)
    await _demand_fit(group, state, told.held, found, view)
    unequal = await _unequal(group, () if mine is None else mine.lines, workers, found, nodes)
    if unequal is not None and not found.agreed:
        sides = tuple(nodes[rank] for rank in unequal.ranks)
        raise Diverged(unequal.text, step=found.newest.step, view=view_id, nodes=sides, tensor=unequal.tensor)
    learners = who_learns(found, workers, learn_from=told.learn_from, min_world_size=view.min_world_size)
    learners = (*learners, *range(view.workers, view.world_size))
    digest = b"" if mine is None else mine.digest
    if learners:
        lesson = None
        if mine is not None and found.sides and found.agreed:
            lesson = await _begin_lessons(state, mine, group, found, learners, view, teacher, told)
        return ViewState(digest, state.version, before, told.check_every, learners=learners, lesson=lesson)
    giver = None
    if found.receivers and found.giver is None:
        _not_given(state, found, group.rank)
    elif group.rank in found.receivers and mine is not None and found.giver is not None:
        giver, digest = found.giver, told.held[found.giver].digest
        await _receive(state, mine, group, found, digest, view_id, told.learn_from)
    elif found.receivers:
        if group.rank == found.giver and mine is not None:
            await _give(mine, group, found, view_id, told.learn_from)
        await together(group)
    version = state.version if giver is None else found.newest
    confirmed_by = () if giver is None else tuple(rank for rank in found.sides[0] if rank != giver)
    registered = all(rank.able for rank in told.held)
    return ViewState(digest, version, before, told.check_every, giver, unequal, confirmed_by, registered=registered)


class StateCheck:
    """A comparison of all ranks' states while a step is open. All ranks begin one at the same step's entry.

    Abandoned, it does no harm: nobody waits for it, and what it sent belongs to its view.
    """

    def __init__(self, state: RankState, group: Group) -> None:
        """Read this rank's state, and begin to tell its digest.

        Raises:
            LocalError: What `save` returned is no state.
        """
        self._group = group
        self._decision = state.version.decision
        mine = state.read()
        self._lines = () if mine is None else mine.lines  # without the tensors: they may be copies
        self._told = tell_all(group, row(state, mine, check_every=0, learn_from=0))

    async def result(self, nodes: Sequence[str], view_id: int) -> Unequal | None:
        """Wait for what all ranks have told.

        Args:
            nodes: Their names, by rank.
            view_id: The view's number, for errors.
        Returns:
            In what they differ, and who from whom; None where all hold the same.
        Raises:
            Corrupted: A rank was told something else than the others, or has told what cannot be.
            PeerError: A rank was lost.
        """
        held = (await heard(self._group, await self._told, nodes=nodes, view_id=view_id)).held
        _check_versions(held, self._decision, nodes, view_id)
        return await _unequal(self._group, self._lines, held, compare(held), nodes)


def _check_versions(held: Sequence[HeldState], newest: int, nodes: Sequence[str], view_id: int) -> None:
    """Raise Corrupted where a rank says that it holds more than was ever committed, which all would take from it.

    newest: the last decision, as the coordinator has told this rank.
    """
    for rank, told in enumerate(held):
        if told.version.decision > newest:
            raise Corrupted(
                f"{nodes[rank]} says that it holds the state after decision {told.version.decision}, and the last one "
                f"was {newest}: nothing was handed over",
                rank=rank,
                view=view_id,
                odd=(rank,),
            )


async def _unequal(
    group: Group,
    lines: Sequence[Line],
    held: Sequence[HeldState],
    found: StateComparison,
    nodes: Sequence[str],
) -> Unequal | None:
    if len(found.sides) <= 1:
        return None
    first = await first_difference(group, lines, held, found.sides, alike=found.alike)
    ranks = found.differing if found.agreed else tuple(sorted(rank for side in found.sides for rank in side))
    return Unequal(ranks, first.path, found.sides[0][0] if found.agreed else None, _text(found, first, nodes))


async def _demand_fit(
    group: Group, state: RankState, held: Sequence[HeldState], found: StateComparison, view: View
) -> None:
    """Refuse ranks whose states are of something else than the job's, on all ranks, with the first difference."""
    odd = misfits(held, found)
    if odd is None:
        return
    first = await first_difference(group, state.described.lines, described(held), odd.sides, alike=False)
    nodes = view.nodes
    what = f"{first.describe(nodes)}. Nothing was handed over: make it the same on all ranks and start again"
    if not odd.agreed:
        sides = " | ".join(", ".join(nodes[rank] for rank in side) for side in odd.sides)
        raise Diverged(
            f"the ranks do not train the same ({sides}), and no more than half agree: {what}",
            step=found.newest.step,
            view=view.view_id,
            nodes=tuple(nodes[rank] for side in odd.sides for rank in side),
            tensor=first.path,
        )
    who = ", ".join(nodes[rank] for rank in odd.refused)
    if group.rank in odd.refused:
        raise LocalError(f"this worker, {nodes[group.rank]}, does not train what the job trains: {what}")
    rank = odd.refused[0]
    text = f"{who} does not train what the job trains, and is refused: {what}"
    raise PeerError(text, rank=rank, node=nodes[rank], view=view.view_id)


def _text(found: StateComparison, first: FirstDifference, nodes: Sequence[str]) -> str:
    sides = " | ".join(", ".join(nodes[rank] for rank in side) for side in found.sides)
    where = f"after step {found.newest.step}" if found.newest.step else "at the start"
    if found.agreed:
        wrong = ", ".join(nodes[rank] for rank in found.differing)
        right = f"that of {nodes[found.sides[0][0]]}" if not found.newest.step else "what most ranks hold"
        return f"the state of {wrong} {where} is not {right}; {first.describe(nodes)}"
    what = f"the ranks hold {len(found.sides)} different states {where} ({sides}): {first.describe(nodes)}"
    if not found.alike:
        return (
            f"{what}. A state of other names, types or shapes is not handed over: give all ranks the same model, and "
            "declare what is each rank's own by register_state(own=...)"
        )
    return (
        f"{what}. No more than half agree, so nobody knows which is right: start all ranks anew from one checkpoint "
        "or seed. What each rank changes by itself (BatchNorm's buffers, a sampler) is averaged in the step, or "
        "declared by register_state(own=...)"
    )


def _not_given(state: RankState, found: StateComparison, rank: int) -> None:
    """Nobody can give, or not all of those that are behind can take."""
    if rank not in found.behind:
        return
    if state.torn:
        raise LocalError(
            "the state of this rank is half overwritten by one that did not come to its end, and nobody can give a "
            "whole one: start this process anew from a checkpoint"
        )
    if found.newest.step:
        raise LocalError(
            f"this rank's state is after step {state.version.step}, the job's after step {found.newest.step}: "
            "call job.register_state(save, load) so that it can be handed over"
        )
    # Nothing was ever trained: the decisions before this one concern no state of its own.
    state.version = StateVersion(found.newest.decision, state.version.step)


async def _begin_lessons(
    state: RankState,
    mine: FlatState,
    group: Group,
    found: StateComparison,
    learners: tuple[int, ...],
    view: View,
    teacher: Teacher,
    told: Told,
) -> Lesson | None:
    """Let the learners know what there is to learn; return that on one of them."""
    learners = tuple(rank for rank in learners if told.held[rank].able)  # a spare need not have registered a state
    holders = {rank: told.held[rank].pupils for rank in found.sides[0]}
    digest = told.held[found.sides[0][0]].digest
    taught = teachers(learners, holders, [member.site for member in view.members])
    mine_to_teach = [learner for learner in learners if taught[learner] == group.rank]
    if mine_to_teach:
        packed = encode_manifest(mine)
        records = decode_manifest(packed, giver=group.rank, view_id=view.view_id).records
        await teacher.take(view, mine_to_teach, records, chunks_of(records, told.learn_from))
        await _send_manifest(group, packed, mine_to_teach)
    if group.rank not in learners:
        return None
    records = (await _receive_manifest(group, taught[group.rank], digest, view.view_id)).records
    places = opened(records, state.places(records, mine), writing=True)
    state.learned = True
    giver = view.members[taught[group.rank]]
    return Lesson(
        view.view_id, giver.node, giver.incarnation, ChunkedState(places, chunks_of(records, told.learn_from))
    )


async def _send_manifest(group: Group, packed: bytes, receivers: Sequence[int]) -> None:
    for receiver in receivers:
        await group.send(np.array([len(packed)], np.int64), to=receiver)
        await group.send(np.frombuffer(packed, np.uint8), to=receiver)


async def _receive_manifest(group: Group, giver: int, digest: bytes, view_id: int) -> Manifest:
    size = int((await group.recv(np.empty(1, np.int64), source=giver))[0])
    if not 0 <= size <= MAX_MANIFEST:
        raise PeerError(f"a state manifest of {size} bytes", rank=giver, view=view_id)
    packed = await group.recv(np.empty(size, np.uint8), source=giver)
    manifest = decode_manifest(memory(packed), giver=giver, view_id=view_id)
    _check_manifest(manifest, digest, giver, view_id)
    return manifest


async def _give(mine: FlatState, group: Group, found: StateComparison, view_id: int, learn_from: int) -> None:
    packed = encode_manifest(mine)
    await _send_manifest(group, packed, found.receivers)
    await transfer(
        group,
        giver=group.rank,
        receivers=found.receivers,
        records=decode_manifest(packed, giver=group.rank, view_id=view_id).records,
        # A state is what its tensors hold; it may be given as parameters that require grad.
        tensors=[detached(part.value) for part in mine.tensors],
        view_id=view_id,
        learn_from=learn_from,
    )


async def _receive(
    state: RankState,
    mine: FlatState,
    group: Group,
    found: StateComparison,
    digest: bytes,
    view_id: int,
    learn_from: int,
) -> None:
    giver = found.giver
    if giver is None or state.load is None:
        raise AssertionError("nobody gives, or this rank cannot take it")
    manifest = await _receive_manifest(group, giver, digest, view_id)
    places = state.places(manifest.records, mine)
    await transfer(
        group,
        giver=giver,
        receivers=found.receivers,
        records=manifest.records,
        tensors=places,
        view_id=view_id,
        learn_from=learn_from,
    )
    await together(group)
    try:
        whole = rebuild(manifest.skeleton, places, mine.own)
    except LocalError as error:
        raise PeerError(f"the state that came cannot be put together: {error}", rank=giver, view=view_id) from error
    done(state.load(whole), "load")
    after = state.read()
    if after is None or after.digest != digest:
        raise LocalError(f"load() did not put the state in place that was handed over: {_other(after, manifest)}")
    state.whole(found.newest)


def _check_manifest(manifest: Manifest, digest: bytes, giver: int, view_id: int) -> None:
    """Raise Corrupted where a manifest describes another state than the one of this digest."""
    tensors = [(record.dtype, record.shape, record.digest) for record in manifest.records]
    try:
        described = described_digest(manifest.skeleton, tensors)
    except LocalError as error:
        raise PeerError(f"the state that is announced is none: {error}", rank=giver, view=view_id) from error
    if described != digest:
        raise Corrupted(
            f"rank {giver} announces another state than the one that it and all other holders have told: it is refused",
            rank=giver,
            view=view_id,
            odd=(giver,),
        )


def _other(after: FlatState | None, manifest: Manifest) -> str:
    """In words, the first thing that save() gives otherwise than it came."""
    given = {} if after is None else {part.path: part for part in after.tensors}
    for record in manifest.records:
        part = given.get(record.path)
        if part is None:
            return f"save() gives no tensor {record.path!r} after it"
        if part.digest != record.digest:
            came, there = f"{record.dtype} {record.shape}", f"{part.dtype} {part.shape}"
            return f"{record.path!r} has other bits after it" + ("" if came == there else f": {there}, not {came}")
    return "a value that is no tensor, or a name, is another one after it"
