"""torch's operations as operations of a group of quicoll's: one implementation for each class that torch takes.

Each method reads what it is given (`asked`), issues operations of the group at once, on the calling thread, and gives a
Work that writes the results when they are there. The order of the calls is what tells operations apart on all ranks, so
nothing here issues an operation later than the call, but for a receive from any rank, whose turn is its own.

What torch leaves open is closed here: tensors of one operation have equal numbers of elements and one type on all ranks
(else all ranks raise Mismatch), whatever their shapes and strides; the bits of a reduction are those of `all_reduce`
(docs/determinism.md). An invalid call raises before anything is sent.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.distributed import AllreduceOptions

from quicoll.errors import PeerError, QuicollError
from quicoll.torch_backend.asked import OPS, Asked, listed, movable, put, read_options, reduced_by, seconds_of
from quicoll.torch_backend.failures import for_torch, refused, say_as_gloo
from quicoll.torch_backend.pool import run_aside
from quicoll.torch_backend.profiled import ProfiledEvent
from quicoll.torch_backend.untraced import untraced
from quicoll.torch_backend.work import OperationWork, WorkHome, WorkPart

if TYPE_CHECKING:
    from quicoll.collectives.group import ThreadGroup
    from quicoll.collectives.handle import Handle

__all__ = ["Methods"]

Finish = Callable[[list[Any]], object]
OperationCall = Callable[["ThreadGroup", float], "Handle[Any]"]
"""Calls an operation of a group that may take so many seconds."""

_AT_ONCE = timedelta(milliseconds=1)


@untraced
class Methods:
    """The operations. `begin_methods` is called before any of them."""

    def begin_methods(self, group: ThreadGroup, *, timeout: float, engine_thread: Callable[[], bool]) -> None:
        """Take the group.

        Args:
            group: Whose operations they are.
            timeout: Seconds for an operation that asks for no other.
            engine_thread: Whether the present thread is the engine's.
        """
        self._timeout = timeout
        self._engine_thread = engine_thread
        self._take_group(group)
        self._issuing = threading.RLock()  # an operation of several parts has its numbers in a row
        self._receiving: dict[int, threading.Event] = {}  # by tag, the last receive from any rank: when it has a source

    def _take_group(self, group: ThreadGroup) -> None:
        """Issue operations of this group from here on."""
        self._group = group
        self._home = WorkHome(self._engine_thread, partial(self._note, group), group)

    # -- how all of them begin -----------------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        tensors: list[torch.Tensor],
        calls: Sequence[OperationCall],
        finish: Finish | None,
        asked: Asked,
        *,
        counted: bool = True,
    ) -> OperationWork:
        """Issue operations, and return what is waited for.

        Args:
            name: What torch has called.
            tensors: Where the results go.
            calls: The operations.
            finish: Takes their results there; None: each to the tensor in its place.
            asked: What else was asked for.
            counted: Whether torch counts it.
        """
        within = asked.timeout or self._timeout
        began = time.monotonic()
        event = ProfiledEvent(name) if _profiler_enabled() else None
        try:
            with self._issuing:
                group, home = self._group, self._home
                home.sequence += counted
                parts: Sequence[WorkPart]
                if len(calls) == 1:
                    parts = (calls[0](group, within).pending,)
                else:
                    parts = [call(group, within).pending for call in calls]
        except QuicollError as error:
            if event is not None:
                event.end(lambda: None)
            raise for_torch(error) from error.__cause__
        return OperationWork(home, name, parts, tensors, finish, within, began=began, event=event)

    def _note(self, group: ThreadGroup, ended: concurrent.futures.Future[int]) -> None:
        """An operation of a group has ended; on the engine's thread, or where it is issued if it has ended by then."""

    # -- operations that compute ---------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> OperationWork:
        """Reduce each tensor in place over all ranks."""
        # The same call as before, as most are: what is below, and `_start`, in one go. Where caches are cold each
        # function between costs half a microsecond. What is not as before gives no part, and is looked at below.
        lone = type(tensors) is list and len(tensors) == 1 and type(opts) is AllreduceOptions and not (more or named)
        if lone and not _profiler_enabled():
            tensor, op, timeout = tensors[0], OPS.get(hash(opts.reduceOp)), opts.timeout
            if op is not None and timeout.days < 0:
                began, within = time.monotonic(), self._timeout
                try:
                    with self._issuing:
                        home = self._home
                        part = home.group.all_reduce_again(tensor, tensor.numel(), op=op, timeout=within)
                        home.sequence += part is not None
                except QuicollError as error:
                    raise for_torch(error) from error.__cause__
                if part is not None:
                    return OperationWork(home, "all_reduce", (part,), [tensor], None, within, began=began)
        given = listed(tensors)
        asked = read_options(opts, *more, **named)
        for tensor in given:
            if tensor.is_sparse:
                return self._allreduce_sparse(given, asked)
        return self._reduced("all_reduce", given, asked)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, **named: Any) -> OperationWork:
        """Reduce several tensors as one operation, where they are of one type."""
        return self._reduced("all_reduce_coalesced", listed(tensors), read_options(opts, **named))

    def _reduced(self, name: str, tensors: list[torch.Tensor], asked: Asked) -> OperationWork:
        if len(tensors) == 1:  # as mostly: no list of it
            data, op = reduced_by(asked.op, tensors[0])

            def call(group: ThreadGroup, within: float) -> Handle[Any]:
                return group.all_reduce(data, op=op, timeout=within)

            return self._start(name, tensors, (call,), None, asked)
        whole = len({tensor.dtype for tensor in tensors}) == 1
        buckets = [tensors] if whole else [[tensor] for tensor in tensors]
        calls = [_all_reduce(bucket, asked) for bucket in buckets]
        return self._start(name, tensors, calls, partial(_put_each, buckets), asked)

    def _allreduce_sparse(self, tensors: list[torch.Tensor], asked: Asked) -> OperationWork:
        """Add sparse tensors: the rows that any rank has, as a dense tensor, in the order of `all_reduce`.

        Which rows these are has to be known before the values can be reduced. So the call waits for that, on all ranks.
        """
        reduced_by(asked.op, torch.empty(0))
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise refused(f"a sparse tensor on device {tensor.device}: all_reduce takes those of the CPU")
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            own = tensor.detach().coalesce()
            mine = _ravel(own.indices(), own.shape[: own.sparse_dim()])
            keys = torch.unique(self._all_of(mine, asked), sorted=True)
            values = torch.zeros((keys.numel(), *own.values().shape[1:]), dtype=own.dtype, device="cpu")
            values[torch.searchsorted(keys, mine)] = own.values()
            rows.append((keys, values))
        calls = [_all_reduce([values], asked) for _, values in rows]

        def finish(results: list[Any]) -> None:
            for tensor, (keys, values), totals in zip(tensors, rows, results, strict=True):
                indices = _unravel(keys, tensor.shape[: tensor.sparse_dim()])
                summed = totals[0].view(values.shape)
                total = torch.sparse_coo_tensor(
                    indices, summed, tensor.shape, check_invariants=False, is_coalesced=True
                )
                tensor.copy_(
                    total
                )  # what is sparse has its memory in tensors of its own, which `.data` would not change

        return self._start("sparse_all_reduce", tensors, calls, finish, asked)

    def _all_of(self, given: torch.Tensor, asked: Asked) -> torch.Tensor:
        """Wait for all ranks' numbers, of which each may have others and more."""
        found: list[torch.Tensor] = []

        def call(group: ThreadGroup, within: float) -> Handle[Any]:
            return group.all_gather(given, timeout=within)

        self._start("sparse_indices", [], [call], found.extend, asked).wait()
        return found[0]

    def reduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> OperationWork:
        """Reduce to the root, in place; elsewhere tensors stay as they are."""
        given, asked = listed(tensors), read_options(opts, *more, **named)
        data, op = _flat_of(given, asked.op)

        def finish(results: list[Any]) -> None:
            for tensor, total in zip(given, results[0] or [], strict=False):
                put(tensor, total)

        def call(group: ThreadGroup, within: float) -> Handle[Any]:
            return group.reduce(data, root=asked.root, op=op, timeout=within)

        return self._start("reduce", given, [call], finish, asked)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any) -> OperationWork:
        """Reduce a list of one tensor for each rank; each gets its own. They may be of different sizes."""
        outs = listed(outputs)
        lists = [listed(inputs)] if isinstance(outputs, torch.Tensor) else [listed(each) for each in inputs]
        for given in lists:
            self._demand_each(given, "reduce_scatter")
        return self._scattered("reduce_scatter", outs, lists, read_options(opts, *more, **named))

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None, **named: Any) -> OperationWork:
        """Reduce a tensor of one part for each rank; each gets its own."""
        return self.reduce_scatter_single_coalesced([output], [given], opts, **named)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None, **named: Any
    ) -> OperationWork:
        """Do this for several tensors at once."""
        lists = []
        for output, given in zip(outputs, inputs, strict=True):
            if given.numel() != output.numel() * self._group.world_size:
                raise refused(
                    f"reduce_scatter of {given.numel()} elements gives none of {self._group.world_size} ranks "
                    f"{output.numel()}"
                )
            lists.append([given])
        return self._scattered("reduce_scatter_tensor", listed(outputs), lists, read_options(opts, **named))

    def _scattered(
        self, name: str, outputs: list[torch.Tensor], lists: list[list[torch.Tensor]], asked: Asked
    ) -> OperationWork:
        calls: list[OperationCall] = []
        for output, given in zip(outputs, lists, strict=True):
            data, op = _flat_of(given, asked.op)
            world = self._group.world_size
            counts = [part.numel() for part in data] if len(data) == world else [output.numel()] * world
            if counts[self._group.rank] != output.numel() or output.dtype is not data[0].dtype:
                raise refused(f"{name}: the output has {output.numel()} {output.dtype}, the input of this rank another")
            whole = data[0] if len(data) == 1 else torch.cat(data)
            calls.append(partial(_reduce_scatter, whole, op, counts))
        return self._start(name, outputs, calls, None, asked)

    # -- operations that move ------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> OperationWork:
        """Give every rank the root's tensors, in place."""
        given, asked = listed(tensors), read_options(opts, *more, **named)
        data = [movable(tensor) for tensor in given]
        here = self._group.rank == asked.root  # asked now: when the result is written, the group may have other members

        calls = [partial(_broadcast, each, asked.root) for each in data]

        def finish(results: list[Any]) -> None:
            if not here:
                _put_all(given, results)

        return self._start("broadcast", given, calls, finish, asked)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any) -> OperationWork:
        """Give every rank all ranks' tensors, one output for each rank."""
        lone = isinstance(inputs, torch.Tensor)
        lists = [listed(outputs)] if lone else [listed(each) for each in outputs]
        return self._gathered("all_gather", lists, listed(inputs), read_options(opts, *more, **named))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> OperationWork:
        """Do this for several tensors; outputs[rank][i] is for tensor i of a rank."""
        lists = [list(each) for each in zip(*outputs, strict=True)]
        return self._gathered("all_gather_coalesced", lists, listed(inputs), read_options(opts, **named))

    def _gathered(
        self, name: str, lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], asked: Asked
    ) -> OperationWork:
        if len(lists) != len(inputs):
            raise refused(f"{name}: {len(inputs)} tensors and {len(lists)} lists of outputs")
        for outputs, given in zip(lists, inputs, strict=True):
            self._demand_each(outputs, name)
            for output in outputs:
                _demand_alike(output, given, name)
        data = [movable(given).unsqueeze(0) for given in inputs]

        counts = [1] * self._group.world_size
        calls = [partial(_all_gather, each, counts) for each in data]

        def finish(results: list[Any]) -> None:
            for outputs, rows in zip(lists, results, strict=True):
                _put_all(outputs, list(rows))

        return self._start(name, [each for outputs in lists for each in outputs], calls, finish, asked)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None, **named: Any) -> OperationWork:
        """Give every rank all ranks' tensors, one after the other in one output."""
        return self.all_gather_single_coalesced([output], [given], opts, **named)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> OperationWork:
        """Do this for several tensors at once."""
        asked = read_options(opts, **named)
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != given.numel() * self._group.world_size or output.dtype is not given.dtype:
                raise refused(
                    f"all_gather of {given.numel()} {given.dtype} on {self._group.world_size} ranks is not "
                    f"{output.numel()} {output.dtype}"
                )
        data = [movable(given).unsqueeze(0) for given in inputs]

        counts = [1] * self._group.world_size
        calls = [partial(_all_gather, each, counts) for each in data]

        def finish(results: list[Any]) -> None:
            _put_all(outputs, [rows.reshape(-1) for rows in results])

        return self._start("all_gather_into_tensor", list(outputs), calls, finish, asked)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any) -> OperationWork:
        """Give the root all ranks' tensors."""
        asked = read_options(opts, *more, **named)
        (given,) = listed(inputs)
        here = self._group.rank == asked.root
        outs = [] if not here else listed(outputs) if isinstance(inputs, torch.Tensor) else listed(outputs[0])
        if here:
            self._demand_each(outs, "gather")
        for output in outs:
            _demand_alike(output, given, "gather")
        data = movable(given).unsqueeze(0)

        def finish(results: list[Any]) -> None:
            if here:
                _put_all(outs, list(results[0]))

        counts = [1] * self._group.world_size

        def call(group: ThreadGroup, within: float) -> Handle[Any]:
            return group.gather(data, root=asked.root, counts=counts, timeout=within)

        return self._start("gather", outs, [call], finish, asked)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any) -> OperationWork:
        """Give each rank its tensor of the root's."""
        asked = read_options(opts, *more, **named)
        (output,) = listed(outputs)
        if self._group.rank == asked.root:
            parts = listed(inputs) if isinstance(outputs, torch.Tensor) else listed(inputs[0])
            self._demand_each(parts, "scatter")
            for part in parts:
                _demand_alike(part, output, "scatter")
            data = torch.stack([movable(part) for part in parts])
        else:
            data = movable(output).unsqueeze(0)

        def call(group: ThreadGroup, within: float) -> Handle[Any]:
            return group.scatter(data, root=asked.root, timeout=within)

        return self._start("scatter", [output], [call], lambda results: put(output, results[0].reshape(-1)), asked)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any) -> OperationWork:
        """Send a tensor to each rank, and get one from each."""
        outs, given = listed(outputs), listed(inputs)
        self._demand_each(given, "all_to_all")
        self._demand_each(outs, "all_to_all")
        asked = read_options(opts, *more, **named)
        return self._exchanged([movable(each) for each in given], outs, asked)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        opts: Any = None,
        **named: Any,
    ) -> OperationWork:
        """Send rows to each rank, and get rows from each; no splits: equally many."""
        asked = read_options(opts, **named)
        outs = self._rows(output, out_splits)
        return self._exchanged([movable(each) for each in self._rows(given, in_splits)], outs, asked)

    def _rows(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        world = self._group.world_size
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            if rows % world:
                raise refused(f"all_to_all: {rows} rows do not divide equally between {world} ranks; pass split sizes")
            splits = [rows // world] * world
        if len(splits) != world or sum(splits) != rows or min(splits) < 0:
            raise refused(f"all_to_all: split sizes {list(splits)} are not {rows} rows for {world} ranks")
        return list(torch.split(tensor.data, list(splits))) if tensor.dim() else [tensor.data]

    def _exchanged(self, parts: list[torch.Tensor], outputs: list[torch.Tensor], asked: Asked) -> OperationWork:
        sizes = [movable(output).numel() for output in outputs]

        def finish(results: list[Any]) -> None:
            for rank, (came, size) in enumerate(zip(results[0], sizes, strict=True)):
                if came.numel() != size:
                    raise refused(f"all_to_all: rank {rank} sent {came.numel()} elements, {size} are expected here")
            _put_all(outputs, results[0])

        def call(group: ThreadGroup, within: float) -> Handle[Any]:
            return group.all_to_all(parts, timeout=within)

        return self._start("all_to_all", outputs, [call], finish, asked)

    # -- meetings ------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, **named: Any) -> OperationWork:
        """Wait until every rank is here."""
        asked = read_options(opts, **named)
        return self._start("barrier", [], [lambda group, within: group.barrier(timeout=within)], _nothing, asked)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank is here; the error has Gloo's words for it too, which programs may look for.

        Args:
            timeout: Of this barrier; None takes the group's. None is left of zero or less.
            wait_all_ranks: Whether those words name all ranks that have not come, or the first one.
        Raises:
            PeerError: A rank has not come. It names all that have not, whatever `wait_all_ranks` says.
        """
        if timeout is not None:
            timeout = max(timeout, _AT_ONCE)
        try:
            self.barrier(timeout=timeout).wait()
        except PeerError as error:
            within = seconds_of(timeout) or self._timeout
            say_as_gloo(error, rank=self._group.rank, within=within, every=wait_all_ranks)
            raise

    # -- between two ranks ---------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> OperationWork:
        """Send a tensor; over when the receiver has all of it."""
        data = [movable(tensor) for tensor in listed(tensors)]

        calls = [partial(_send, each, dst, tag) for each in data]
        return self._start("send", [], calls, _nothing, read_options(None), counted=False)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> OperationWork:
        """Receive what a rank sends with this tag, in the order in which it sends."""
        given = listed(tensors)
        data = [movable(tensor) for tensor in given]

        calls = [partial(_receive, each, src, tag) for each in data]
        work = self._start("recv", given, calls, None, read_options(None), counted=False)
        work.sent_by(src)
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> OperationWork:
        """Receive what a rank sends with this tag, from whichever sends first."""
        (given,) = listed(tensors)
        data, within = movable(given), self._timeout
        part = _Later()
        with self._issuing:
            group = self._group
            before = self._receiving.get(tag)
            found = self._receiving[tag] = threading.Event()
        event = ProfiledEvent("recvAnySource") if _profiler_enabled() else None
        work = OperationWork(WorkHome(self._engine_thread), "recv", [part], [given], None, within, event=event)

        def receive() -> None:
            try:
                if before is not None:
                    before.wait(within)
                source = group.wait_for_sender(tag=tag, timeout=within)
                handle = group.recv(data, source=source, tag=tag, timeout=within)
            except BaseException as error:  # raised by whoever waits
                part.fail(error)
                return
            finally:
                found.set()
            work.sent_by(source)
            part.follow(handle.pending)

        run_aside(receive)
        return work

    # -- checks --------------------------------------------------------------------------------------------------

    def _demand_each(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        if len(tensors) != self._group.world_size:
            raise refused(f"{name}: {len(tensors)} tensors for {self._group.world_size} ranks")

    # The names that torch's older versions call.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _Later:
    """A part that is issued when it is known from whom it receives."""

    def __init__(self) -> None:
        self.future: concurrent.futures.Future[WorkPart] = concurrent.futures.Future()

    def attend_thread(self, *, ends: bool = False) -> None:
        pass  # it waits in a thread of its own, which says so

    def take_or_raise(self) -> Any:
        return self.future.result().take_or_raise()

    def follow(self, part: WorkPart) -> None:
        part.future.add_done_callback(lambda _: self.future.set_result(part))

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)


def _flat_of(tensors: list[torch.Tensor], op: Any) -> tuple[list[torch.Tensor], str]:
    """As `reduced_by`, for tensors of one type."""
    reduced = [reduced_by(op, tensor) for tensor in tensors]
    return [data for data, _ in reduced], reduced[0][1]


def _all_reduce(tensors: list[torch.Tensor], asked: Asked) -> OperationCall:
    """Return the call that reduces some tensors as one operation."""
    data, op = _flat_of(tensors, asked.op)
    return lambda group, within: group.all_reduce(data, op=op, timeout=within)


def _reduce_scatter(
    given: torch.Tensor, op: str, counts: list[int], group: ThreadGroup, within: float
) -> Handle[torch.Tensor]:
    return group.reduce_scatter(given, op=op, counts=counts, timeout=within)


def _broadcast(given: torch.Tensor, root: int, group: ThreadGroup, within: float) -> Handle[torch.Tensor]:
    return group.broadcast(given, root=root, timeout=within)


def _all_gather(given: torch.Tensor, counts: list[int], group: ThreadGroup, within: float) -> Handle[torch.Tensor]:
    return group.all_gather(given, counts=counts, timeout=within)


def _send(given: torch.Tensor, to: int, tag: int, group: ThreadGroup, within: float) -> Handle[None]:
    return group.send(given, to=to, tag=tag, timeout=within)


def _receive(like: torch.Tensor, source: int, tag: int, group: ThreadGroup, within: float) -> Handle[torch.Tensor]:
    return group.recv(like, source=source, tag=tag, timeout=within)


def _put_all(tensors: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
    for tensor, result in zip(tensors, results, strict=True):
        put(tensor, result)


def _put_each(buckets: Sequence[Sequence[torch.Tensor]], results: Sequence[Any]) -> None:
    for bucket, totals in zip(buckets, results, strict=True):
        _put_all(bucket, totals)


def _nothing(_: list[Any]) -> None:
    return None


def _demand_alike(one: torch.Tensor, other: torch.Tensor, name: str) -> None:
    if one.numel() != other.numel() or one.dtype is not other.dtype:
        raise refused(
            f"{name}: tensors of one call differ, {tuple(one.shape)} of {one.dtype} and {tuple(other.shape)} of "
            f"{other.dtype}; sizes that differ from rank to rank are for all_to_all"
        )


def _ravel(indices: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """One number for each column of indices, in their order."""
    keys = torch.zeros(indices.shape[1], dtype=torch.int64, device="cpu")
    for size, row in zip(sizes, indices, strict=True):
        keys = keys * size + row
    return keys


def _unravel(keys: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    rows: list[torch.Tensor] = []
    for size in reversed(sizes):
        rows.append(keys % size)
        keys = keys // size
    return torch.stack(rows[::-1])
