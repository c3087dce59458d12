"""The lease core on a virtual clock: when it asks, what follows from answers, and clocks that are wrong."""

from __future__ import annotations

import random

import pytest

from quicoll.errors import LocalError
from quicoll.membership.coordinator.lease import (
    LEASE_TRANSITIONS,
    TURN,
    Following,
    HeldBy,
    LeaseCore,
    LeaseRequest,
    LeaseState,
    Taken,
    may_take,
    rest_ns,
)

SECOND = 1_000_000_000
LEASE = 5 * SECOND


class Database:
    """The lease's row, judged by a clock of its own."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.token = 0
        self.holder = ""
        self.until_ns = 0
        self.nodes = 0
        self.idle_since_ns: int | None = None
        self.set_ns = 0  # by how much its clock was set

    @property
    def clock_ns(self) -> int:
        return self.now_ns + self.set_ns

    def take(self, holder: str, following: Following) -> Taken | HeldBy:
        now_ns, idle_ns = self.clock_ns, self.idle_since_ns
        if not may_take(
            left_ns=self.until_ns - now_ns,
            length_ns=LEASE,
            idle_ns=None if idle_ns is None else now_ns - idle_ns,
            nodes=self.nodes,
            waiting=following.nodes,
        ):
            return HeldBy(self.token, self.holder, self.until_ns - now_ns)
        self.token += 1
        self.holder, self.until_ns = holder, now_ns + LEASE
        self.nodes, self.idle_since_ns = following.nodes, now_ns
        return Taken(self.token)

    def renew(self, token: int, following: Following) -> Taken | HeldBy:
        now_ns, idle_ns = self.clock_ns, self.idle_since_ns
        if token != self.token:
            return HeldBy(self.token, self.holder, self.until_ns - now_ns)
        self.until_ns, self.nodes = now_ns + LEASE, following.nodes
        self.idle_since_ns = None if following.at_work else now_ns if idle_ns is None else min(now_ns, idle_ns)
        return Taken(token)


class Process:
    """A coordinator whose clock is `rate` times as fast as the database's, and began at another time."""

    def __init__(self, name: str, database: Database, *, rate: float = 1.0, began_ns: int = 0) -> None:
        self.name, self._database, self._rate, self._began_ns = name, database, rate, began_ns
        self.reachable = True
        self.following = Following()
        self.core = LeaseCore(lease_ns=LEASE, now_ns=self.now_ns)

    @property
    def now_ns(self) -> int:
        return self._began_ns + round(self._database.now_ns * self._rate)

    def work(self) -> None:
        """Make the request that is due, if one is."""
        request = self.core.due(self.now_ns)
        if request is None:
            return
        if not self.reachable:
            self.core.failed("no answer", now_ns=self.now_ns)
            return
        database = self._database
        if request is LeaseRequest.TAKE:
            answer = database.take(self.name, self.following)
        else:
            answer = database.renew(self.core.token, self.following)
        self.core.answered(answer, now_ns=self.now_ns)


def run(database: Database, processes: list[Process], until_ns: int, *, step_ns: int = SECOND // 100) -> None:
    while database.now_ns < until_ns:
        database.now_ns += step_ns
        for process in processes:
            process.work()


def test_the_first_to_ask_leads_and_the_other_stands_by_and_knows_who() -> None:
    database = Database()
    a, b = Process("a:1", database), Process("b:1", database)
    run(database, [a, b], 60 * SECOND)
    assert (a.core.state, b.core.state) == (LeaseState.LEADING, LeaseState.STANDBY)
    assert (a.core.token, b.core.token, b.core.leader) == (1, 0, "a:1")


def test_another_leads_at_the_latest_one_lease_after_the_last_renewal() -> None:
    for died_ns in range(10 * SECOND, 14 * SECOND, SECOND // 7):
        database = Database()
        a, b = Process("a:1", database), Process("b:1", database)
        run(database, [a, b], died_ns)
        last_ns = database.until_ns - LEASE
        while b.core.state is LeaseState.STANDBY:
            run(database, [b], database.now_ns + SECOND // 100)
        assert b.core.token == 2
        assert LEASE <= database.now_ns - last_ns <= LEASE + SECOND // 20


def test_a_leader_that_has_not_renewed_for_half_its_time_is_no_one_to_go_to() -> None:
    database = Database()
    a, b = Process("a:1", database), Process("b:1", database)
    run(database, [a, b], 10 * SECOND)
    assert b.core.leader == "a:1"
    run(database, [b], 14 * SECOND)
    assert b.core.leader == ""


def test_a_lease_that_is_given_up_is_taken_within_a_fifth_of_its_time() -> None:
    database = Database()
    a, b = Process("a:1", database), Process("b:1", database)
    run(database, [a, b], 10 * SECOND)
    database.until_ns = database.now_ns
    run(database, [b], 11 * SECOND + SECOND // 20)
    assert b.core.state is LeaseState.LEADING


def test_a_leader_that_cannot_renew_ends_and_says_why() -> None:
    database = Database()
    a = Process("a:1", database)
    run(database, [a], SECOND)
    a.reachable = False
    run(database, [a], 4 * SECOND)
    assert (a.core.state, a.core.cause, a.core.next_timer()) == (LeaseState.ENDED, "no answer", None)
    assert a.core.due(100 * SECOND) is None


def test_one_that_stands_by_without_a_database_asks_on_and_knows_no_leader() -> None:
    database = Database()
    a, b = Process("a:1", database), Process("b:1", database)
    run(database, [a, b], SECOND)
    b.reachable = False
    run(database, [a, b], 10 * SECOND)
    assert (b.core.state, b.core.leader, b.core.cause) == (LeaseState.STANDBY, "", "no answer")
    b.reachable = True
    run(database, [a, b], 12 * SECOND)
    assert (b.core.leader, b.core.cause) == ("a:1", "")


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 1.1, 3.0, 50.0])
def test_a_leader_whose_clock_is_wrong_shares_no_token_and_a_slow_one_is_deposed(rate: float) -> None:
    """Safety needs no clock but the database's: at each moment one token is the last, and it has one holder."""
    database = Database()
    a, b = Process("a:1", database, rate=rate, began_ns=-(10**15)), Process("b:1", database, began_ns=10**18)
    led: dict[int, str] = {}
    for _ in range(1000):
        run(database, [a, b], database.now_ns + SECOND // 50)
        assert led.setdefault(database.token, database.holder) == database.holder
        leaders = [each for each in (a, b) if each.core.state is LeaseState.LEADING]
        assert len({each.core.token for each in leaders}) == len(leaders)
        assert sum(each.core.token == database.token for each in leaders) <= 1
    assert a.core.state is (LeaseState.ENDED if rate <= 0.2 else LeaseState.LEADING)
    if rate <= 0.2:
        assert b.core.state is LeaseState.LEADING
        assert "taken over by b:1 with token 2" in a.core.cause


def test_at_no_time_two_are_the_last_holder_whatever_fails() -> None:
    for seed in range(12):
        rng = random.Random(seed)
        database = Database()
        processes = [Process(f"{name}:1", database, rate=rng.choice([0.3, 1.0, 2.0])) for name in "abc"]
        for _ in range(300):
            for process in processes:
                if rng.random() < 0.02:
                    process.reachable = not process.reachable
            run(database, processes, database.now_ns + SECOND // 10, step_ns=SECOND // 10)
            assert sum(p.core.state is LeaseState.LEADING and p.core.token == database.token for p in processes) <= 1


@pytest.mark.parametrize(
    ("at_leader", "waiting", "leases"),
    [
        (Following(0), 1, 1),  # it reaches nobody
        (Following(1), 3, 1),  # most of the nodes are elsewhere
        (Following(2), 2, TURN),  # counting does not tell: they take turns
        (Following(3), 1, TURN),
        (Following(1, at_work=True), 3, None),  # of a cut network the side with a view goes on
        (Following(0), 0, None),  # an idle job
        (Following(3), 0, None),  # all wait at the leader for more
    ],
    ids=repr,
)
def test_from_a_leader_without_a_view_it_is_taken_by_one_at_which_nodes_wait(
    at_leader: Following, waiting: int, leases: int | None
) -> None:
    database = Database()
    a, b = Process("a:1", database), Process("b:1", database)
    a.following = Following(3, at_work=True)
    run(database, [a, b], 20 * SECOND)
    a.following, b.following = at_leader, Following(waiting)
    lost_ns = database.now_ns
    while b.core.state is LeaseState.STANDBY and database.now_ns < lost_ns + 20 * LEASE:
        run(database, [a, b], database.now_ns + SECOND // 10)
    if leases is None:
        assert (a.core.state, b.core.state) == (LeaseState.LEADING, LeaseState.STANDBY)
        return
    # until it says so, the time itself, and until the other asks
    waited_ns = database.now_ns - lost_ns
    assert leases * LEASE <= waited_ns <= (leases + 0.25 + 0.2) * LEASE + SECOND // 5
    run(database, [a, b], database.now_ns + LEASE)
    assert (a.core.state, b.core.token) == (LeaseState.ENDED, 2)
    assert "taken over by b:1 with token 2" in a.core.cause


def test_who_has_the_more_nodes_of_a_job_without_a_view_keeps_the_lease() -> None:
    """What was taken for the number of nodes is not taken back for it."""
    database = Database()
    a, b = Process("a:1", database), Process("b:1", database)
    a.following, b.following = Following(1), Following(2)
    run(database, [a, b], 2 * LEASE)
    assert (a.core.state, b.core.state) == (LeaseState.ENDED, LeaseState.LEADING)
    again = Process("a:1", database)
    again.following = Following(1)
    run(database, [again, b], (TURN - 1) * LEASE)
    assert (again.core.state, b.core.state) == (LeaseState.STANDBY, LeaseState.LEADING)


@pytest.mark.parametrize("hours", [-5, -1, 1, 5])
def test_a_database_whose_clock_is_set_by_hours_keeps_nobody_from_the_lead_for_longer_than_two_leases(
    hours: int,
) -> None:
    for died in (False, True):
        database = Database()
        a, b = Process("a:1", database), Process("b:1", database)
        run(database, [a, b], 20 * SECOND)
        database.set_ns = hours * 3600 * SECOND
        run(database, [b] if died else [a, b], database.now_ns + 2 * LEASE + SECOND)
        last = [each for each in (a, b) if each.core.token == database.token]
        assert [each.core.state for each in last] == [LeaseState.LEADING]
        if died:
            assert last == [b]


def test_a_clock_that_is_set_back_makes_no_leader_idle_in_times_to_come() -> None:
    database = Database()
    a, b = Process("a:1", database), Process("b:1", database)
    a.following = Following(3)
    run(database, [a, b], 20 * SECOND)
    database.set_ns = -3600 * SECOND
    a.following, b.following = Following(0), Following(3)
    run(database, [a, b], database.now_ns + 2 * LEASE)
    assert b.core.state is LeaseState.LEADING


def test_one_request_is_under_way_at_a_time_and_no_answer_comes_without_one() -> None:
    core = LeaseCore(lease_ns=LEASE, now_ns=0)
    assert core.due(0) is LeaseRequest.TAKE
    assert core.due(SECOND) is None
    assert core.next_timer() is None
    core.answered(Taken(4), now_ns=SECOND)
    assert core.next_timer() == LEASE // 4  # since it was asked for, not since the answer
    with pytest.raises(LocalError, match="answers no request"):
        core.answered(Taken(4), now_ns=SECOND)
    with pytest.raises(LocalError, match="above 0"):
        LeaseCore(lease_ns=0, now_ns=0)


def test_a_renewal_that_names_another_token_is_the_end() -> None:
    core = LeaseCore(lease_ns=LEASE, now_ns=0)
    core.due(0)
    core.answered(Taken(4), now_ns=0)
    core.due(LEASE)
    core.answered(Taken(5), now_ns=LEASE)
    assert core.state is LeaseState.ENDED


def test_every_state_but_the_end_leads_on() -> None:
    assert set(LEASE_TRANSITIONS) == set(LeaseState)
    assert [state for state, after in LEASE_TRANSITIONS.items() if not after] == [LeaseState.ENDED]


def test_who_loses_the_lease_early_again_and_again_rests_ever_longer_up_to_a_bound() -> None:
    rests = [rest_ns(times, length_ns=LEASE) for times in range(7)]
    assert rests == [0, LEASE, 2 * LEASE, 4 * LEASE, 8 * LEASE, 8 * LEASE, 8 * LEASE]
    core = LeaseCore(lease_ns=LEASE, now_ns=SECOND, rest_ns=LEASE)
    assert core.due(SECOND) is None
    assert core.next_timer() == SECOND + LEASE
    assert core.due(SECOND + LEASE) is LeaseRequest.TAKE


def test_a_lease_is_lost_early_where_it_was_not_had_for_its_length_since_it_was_asked_for() -> None:
    core = LeaseCore(lease_ns=LEASE, now_ns=0)
    assert not core.is_early(0)
    core.due(0)
    core.answered(Taken(1), now_ns=SECOND)
    assert core.is_early(LEASE - 1)
    assert not core.is_early(LEASE)


def test_two_that_take_it_from_each_other_as_the_databases_clock_runs_fast_leave_it_to_one_for_longer_and_longer() -> (
    None
):
    """Ten times as fast: a lease has run out long before it is renewed. Yet a view needs some leases' time."""
    database = Database()
    cores: dict[str, LeaseCore] = {name: LeaseCore(lease_ns=LEASE, now_ns=0) for name in "ab"}
    early = dict.fromkeys("ab", 0)
    led: list[tuple[int, str]] = []
    for tick in range(0, 400 * SECOND, SECOND // 20):
        database.now_ns = 10 * tick
        for name, core in list(cores.items()):
            request = core.due(tick)
            if request is None:
                continue
            nobody = Following()
            answer = database.take(name, nobody) if request is LeaseRequest.TAKE else database.renew(core.token, nobody)
            taken = core.state is LeaseState.STANDBY and isinstance(answer, Taken)
            core.answered(answer, now_ns=tick)
            if taken:
                led.append((tick, name))
            if core.state is LeaseState.ENDED:
                early[name] = early[name] + 1 if core.is_early(tick) else 0
                rest = rest_ns(early[name], length_ns=LEASE)
                cores[name] = LeaseCore(lease_ns=LEASE, now_ns=tick, rest_ns=rest)
    ends = [tick for tick, _ in led[1:]]
    longest = max(end - began for (began, _), end in zip(led, ends, strict=False))
    assert longest >= 4 * LEASE
