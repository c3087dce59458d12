"""Which processes a group is made of, and how that changes while the group stays the same object.

torch's fault tolerance (`dist._reconfigure` from 2.14 on, torchft's Manager) names the members: each group has a
handle, the program carries the handles to whoever shall take part, and every one of these calls `reconfigure` with
the same list and a number, the uuid, that was not used before. `shrink` is the same without handles: the ranks that
stay name those that do not.

    waiting     no view: made with `enable_reconfigure`, aborted, or a change has failed; operations raise LocalError
    at work     in a view
    changing    a thread is in `reconfigure` or `shrink`; operations raise LocalError
    ended       destroyed; for good

    waiting, at work --reconfigure, shrink--> changing --all have come, their coordinator's view is there--> at work
    changing --anything else, by the timeout--> waiting         at work --abort--> waiting

How a change is agreed. The members meet at torch's store, under a key that is new each time (the uuid; or the name of
the view that shrinks and which attempt it is). Each takes its place there, once and for all, and says whose list it
holds, as a digest. When all places are taken and all digests are equal, a session begins (`sessions`): an authority
and a coordinator for this change alone, which agrees on one view, of exactly these processes in exactly this order.

Why no view of the old coordinator: its rules (more than half of the last view, whoever is at hand) decide who works
on, and here the program has decided. So a change never asks the former coordinator, which may be gone with the rank
that kept it, and lets in processes that it has never seen. What is lost by that is said in docs/torch_backend.md: two
parts of a group that are told different lists are two groups afterwards.

Invariants:

- A key is used once. A place that is taken is refused to whoever comes later, and a group tries a uuid once, whatever
  becomes of it. Before the former view is given up, so who is refused for that has still got it.
- No operation of one view meets one of another: sessions share neither keys, nor addresses, nor numbers of
  operations. What was under way ends with an error, here at once, elsewhere by the announcement that this rank has
  left.
- A result that came before is written to its tensors by the view that it came in, whenever it is waited for.
- A view is installed on a rank exactly if all of its members came with one list.

Failure cases, each of them an error on every rank that has come, by the timeout: a member does not come: PeerError
names the first such rank. Another list: Mismatch names the rank that has it. The store is gone, with the process that
served it: PeerError. `abort` in another thread: LocalError when the change ends, which is at its timeout at the
latest. After each the group waits, and may be reconfigured with another uuid.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch._C._distributed_c10d import ErrorType
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, though not in its __all__

from quicoll.errors import LocalError, Mismatch, PeerError, QuicollError
from quicoll.rendezvous.stores import GivenStore
from quicoll.torch_backend.asked import seconds_of
from quicoll.torch_backend.failures import for_torch, refused
from quicoll.torch_backend.methods import Methods
from quicoll.torch_backend.sessions import (
    JobSession,
    coordinator_is_named,
    demand_shared,
    open_session,
    session_of_default_group,
)
from quicoll.torch_backend.untraced import untraced
from quicoll.torch_backend.work import OperationWork

if TYPE_CHECKING:
    import concurrent.futures

    from quicoll.collectives.group import ThreadGroup

__all__ = ["DEFAULT_S", "Reconfigurable", "StorePlace", "read_handles"]

DEFAULT_S = 1800.0  # torch's own
_HANDLE = re.compile(r"quicoll:[0-9a-f]{32}")
_MOST = 1 << 16  # handles of one group
_SHUTDOWN_S = 1.0
_FIRST_PAUSE_S = 0.02
_LAST_PAUSE_S = 0.25
_NAMED = (
    "the settings name a coordinator, which is for the ranks of one launch; leave QUICOLL_COORDINATOR and QUICOLL_CERTS"
    " unset"
)


class _Unplaced:
    """In the place of a group's view while there is none: whatever is asked of it is refused."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise refused(self._reason)


@untraced
class Reconfigurable(Methods):
    """A group's operations, and its place: in which session, as which rank. See the module's head."""

    def begin(self, options: Any) -> None:
        """Take the place of a group; blocks until its view is at work.

        Args:
            options: torch's: store, group_rank, group_size, timeout, group_id, global_ranks_in_group, which is empty
                for the default group and None for one that torch knows nothing of, and from 2.14 on
                enable_reconfigure: then the group waits for `reconfigure`.
        Raises:
            QuicollError: As `JobSession`.
        """
        own_job = options.global_ranks_in_group is None
        self._default = not own_job and not options.global_ranks_in_group
        self._own_rank, self._own_size = int(options.group_rank), int(options.group_size)
        self._own_store = options.store
        self._pid = os.getpid()
        self._handle = f"quicoll:{secrets.token_hex(16)}"
        self._uuids: set[int] = set()
        self._changing = threading.Lock()
        self._aborts = 0
        self._former = ""  # name of the session that is, or was, at work
        self._attempts = 0  # to shrink it
        self._failed = False
        self._ended = False
        self._session: JobSession | None = None
        self._owner = True
        timeout = seconds_of(options.timeout) or DEFAULT_S
        if getattr(options, "enable_reconfigure", False):
            if coordinator_is_named():
                raise LocalError(f"enable_reconfigure: {_NAMED}")
            self.begin_methods(_nowhere("it waits for reconfigure"), timeout=timeout, engine_thread=self._on_engine)
            return
        shared = None if self._default or own_job else session_of_default_group()
        if shared is not None:
            self._owner, self._session = False, shared
            group = shared.subgroup(list(options.global_ranks_in_group), options.group_id)
        else:
            if not own_job:  # of such a group the ranks may be threads of one process
                demand_shared(options.store, self._own_size)
            self._session = open_session(
                PrefixStore("quicoll", options.store),
                rank=self._own_rank,
                world_size=self._own_size,
                timeout=timeout,
                default=self._default,
            )
            self._former = self._session.name
            group = self._session.group
        self.begin_methods(group, timeout=timeout, engine_thread=self._on_engine)

    def _on_engine(self) -> bool:
        session = self._session
        return session is not None and session.on_engine_thread()

    # -- the end -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the job, if it is that of this group: when the others have what they need of this rank.

        Where that takes longer than a second, it goes on in the background, until the interpreter ends and has waited.
        """
        self._ended = True
        self._aborts += 1
        if self._owner and self._session is not None:
            self._session.close(wait=_SHUTDOWN_S)

    def abort(self) -> None:
        """Leave the job at once: every operation under way raises, here and on the other ranks.

        Nothing is done in a group that is part of another one's job. `reconfigure` makes the group work again.
        """
        self._aborts += 1
        if self._owner and self._session is not None:
            self._session.close(reason="aborted", patience=0.0, finished=False)

    def get_error(self) -> ErrorType:
        """Return whether the group works: SUCCESS, or COMM_ERROR where it has no view or an operation of it has failed.

        For who does not look at each operation, as torchft's Manager. It says nothing of what is under way, and leaves
        out receives from any rank.
        """
        session = self._session
        if session is None or not session.alive or self._failed:
            return ErrorType.COMM_ERROR
        return ErrorType.SUCCESS

    # -- other members -------------------------------------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Whether `reconfigure` can be called: not in a part of another group's job, nor with your own coordinator."""
        return self._owner and not coordinator_is_named()

    def get_reconfigure_handle(self) -> str:
        """Return what names this group in the lists that `reconfigure` takes; the same for as long as the group is.

        Raises:
            LocalError: The group cannot be reconfigured.
        """
        self._demand("get_reconfigure_handle")
        return self._handle

    def reconfigure(self, opts: Any) -> OperationWork:
        """Go on with these members, all of which call this; blocks until their view is at work.

        Operations under way raise, here and on those who are not named. torch's own tables of ranks stay as they are.

        Args:
            opts: torch's ReconfigureOptions, or what has its attributes. uuid: a number that was not used before at
                this store. handles: one of each member; a list gives the ranks, a set is sorted. timeout: for all of
                them to come; None takes the group's.
        Returns:
            A handle of what has ended well.
        Raises:
            LocalError: A used uuid, or handles that cannot be used; the group is as it was. Or it was aborted
                meanwhile.
            PeerError: A member has not come by the timeout, and is named; the group waits.
            Mismatch: A member has another list; the group waits.
        """
        within = seconds_of(opts.timeout) or self._timeout
        with self._change("reconfigure") as aborts:
            uuid, handles = int(opts.uuid), read_handles(opts.handles)
            if self._handle not in handles:
                raise LocalError("reconfigure: the handle of this group is not among those of the members")
            if uuid in self._uuids:
                raise LocalError(f"reconfigure: the uuid {uuid} was already used; each change takes another one")
            self._uuids.add(uuid)
            rank = handles.index(self._handle)
            self._install(f"reconfigure/{uuid}", handles, rank, within, aborts)
        return self._done("reconfigure", within)

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None) -> Any:
        """Go on without these ranks; all others call this. Blocks until their view is at work.

        They keep their order. Operations under way raise, as those of the ranks that are left out.

        Args:
            ranks_to_exclude: Of the present view, or of the last one where it is lost.
            shrink_flags: torch's; whether to abort operations, which is done in any case.
            opts_override: torch's; its timeout is taken if it has one.
        Returns:
            The group itself.
        Raises:
            LocalError: The ranks are none of this group's, or this one is among them; the group is as it was.
            PeerError: A rank that stays has not come by the timeout, and is named; the group waits.
            Mismatch: A rank that stays leaves out others; the group waits.
        """
        within = seconds_of(getattr(opts_override, "_timeout", None)) or self._timeout
        with self._change("shrink") as aborts:
            if not self._former:
                raise LocalError("shrink: the group has not been at work yet; it waits for reconfigure")
            left_out = sorted({int(rank) for rank in ranks_to_exclude})
            if not left_out or left_out[0] < 0 or left_out[-1] >= self._own_size:
                raise LocalError(f"shrink: {list(ranks_to_exclude)} are no ranks of a group of {self._own_size}")
            staying = [rank for rank in range(self._own_size) if rank not in left_out]
            if self._own_rank not in staying:
                raise LocalError(f"shrink: this is rank {self._own_rank}, which is left out; those who stay call it")
            self._attempts += 1
            key = f"shrink/{self._former}/{self._attempts}"
            rank = staying.index(self._own_rank)
            self._install(key, [str(each) for each in staying], rank, within, aborts)
        return self

    # -- inside --------------------------------------------------------------------------------------------------

    def _note(self, group: ThreadGroup, ended: concurrent.futures.Future[int]) -> None:
        """An operation of a group has ended; on the engine's thread, or where it is issued if it has ended by then."""
        error = None if ended.cancelled() else ended.exception()
        if error is not None and not getattr(error, "usable", False) and group is self._group:
            self._failed = True

    def _done(self, name: str, within: float) -> OperationWork:
        return OperationWork(self._home, name, (), [], None, within)

    def _demand(self, name: str) -> None:
        if self._ended:
            raise refused(f"{name}: the process group was destroyed")
        if os.getpid() != self._pid:
            raise refused(f"{name}: this process is a fork of the one that has the process group; make one here")
        if not self._owner:
            raise refused(
                f"{name}: this group is a part of the default group's job; reconfigure that, and make this anew"
            )
        if coordinator_is_named():
            raise refused(f"{name}: {_NAMED}")

    @contextmanager
    def _change(self, name: str) -> Iterator[int]:
        """One thread changes the members at a time. Yields how often the group has been aborted; errors are torch's."""
        self._demand(name)
        if self._engine_thread():
            raise refused(f"{name} is called on the engine's own thread")
        if not self._changing.acquire(blocking=False):
            raise refused(f"{name}: another thread changes the members of this group")
        try:
            yield self._aborts
        except QuicollError as error:
            raise for_torch(error) from error.__cause__
        finally:
            self._changing.release()

    def _install(self, key: str, members: list[str], rank: int, within: float, aborts: int) -> None:
        deadline = time.monotonic() + within
        place = StorePlace(self._own_store, key, members, rank)
        self._put(_nowhere("its members are being changed"), rank=None, size=None)
        try:
            if self._session is not None:
                self._session.close(reason="its group is given other members", patience=0.0, finished=False)
            place.wait(deadline, within, lambda: self._aborts != aborts)
            session = open_session(
                PrefixStore(f"quicoll/{key}", _connection(self._own_store)),
                rank=rank,
                world_size=len(members),
                timeout=self._timeout,
                join_timeout=max(deadline - time.monotonic(), _FIRST_PAUSE_S),
                default=self._default,
            )
        except BaseException:
            self._put(_nowhere("the change of its members failed; it waits for another one"), rank=None, size=None)
            raise
        self._session, self._former, self._attempts = session, session.name, 0
        self._put(session.group, rank=rank, size=len(members))
        if self._aborts != aborts:
            session.close(reason="aborted", patience=0.0, finished=False)
            raise LocalError("it was aborted while its members were changed", usable=False)

    def _put(self, group: ThreadGroup, *, rank: int | None, size: int | None) -> None:
        with self._issuing:
            self._take_group(group)
            self._receiving = {}
            self._failed = False
            if rank is not None and size is not None:
                self._own_rank, self._own_size = rank, size


class StorePlace:
    """A member's place in a change, at torch's store. See the module's head."""

    def __init__(self, store: Any, key: str, members: Sequence[str], rank: int) -> None:
        """Take it.

        Args:
            store: torch's.
            key: Of this change.
            members: Who shall take part, in the order of the ranks.
            rank: Of this one.
        Raises:
            LocalError: It is taken: the key was used before.
            PeerError: The store is gone.
        """
        self._key, self._members, self._rank = key, members, rank
        self._digest = hashlib.sha256("\n".join(members).encode()).hexdigest().encode()
        self._store = GivenStore(_connection(store), "torch's store", f"quicoll/{key}/place/")
        if self._store.count(f"taken/{rank}") != 1:
            raise LocalError(f"{key}: that was already used; each change takes another uuid")
        self._store.set(str(rank), self._digest)

    def wait(self, deadline: float, within: float, given_up: Callable[[], bool]) -> None:
        """Wait until all places are taken.

        Args:
            deadline: On the monotonic clock.
            within: Seconds that this is from the beginning, for errors.
            given_up: Says whether nobody waits for it any more.
        Raises:
            PeerError: One is not taken by then, or the store is gone.
            Mismatch: Somebody has another list.
            LocalError: It was given up.
        """
        missing, pause = list(range(len(self._members))), _FIRST_PAUSE_S
        while True:
            late = time.monotonic() > deadline
            missing = [rank for rank in missing if not self._taken(rank)]
            if not missing:
                return
            if given_up():
                raise LocalError(f"{self._key}: it was aborted", usable=False)
            if late:
                first = missing[0]
                raise PeerError(
                    f"{self._key}: rank {first} ({self._members[first]}) did not come within {within:g} s", rank=first
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE_S)

    def _taken(self, rank: int) -> bool:
        found = self._store.get(str(rank))
        if found not in (None, self._digest):
            raise Mismatch(f"{self._key}: rank {rank} was given other members than rank {self._rank}", rank=rank)
        return found is not None


def _nowhere(reason: str) -> ThreadGroup:
    return cast("ThreadGroup", _Unplaced(f"the process group has no view: {reason}"))


def _connection(store: Any) -> Any:
    """A connection of its own: another thread may wait for a word at the program's, and holds that meanwhile."""
    try:
        return store.clone()
    except RuntimeError as error:
        raise PeerError(
            f"torch's store is gone: {str(error).splitlines()[0] if str(error) else 'no answer'}"
        ) from error


def read_handles(handles: Any) -> list[str]:
    """Return the handles of members in the order of their ranks."""
    listed = list(handles)
    for handle in listed:
        if not isinstance(handle, str) or not _HANDLE.fullmatch(handle):
            raise LocalError(f"reconfigure: {str(handle)[:80]!r} is no handle of a group over quicoll")
    if not 0 < len(listed) <= _MOST or len(set(listed)) != len(listed):
        raise LocalError(f"reconfigure: {len(listed)} handles; one of each member, each of them once")
    return sorted(listed) if isinstance(handles, set | frozenset) else listed
