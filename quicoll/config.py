"""Find the settings of a rank: argument > QUICOLL_* > what a launcher says (torchrun, then others) > default.

Every value remembers its source, so that `quicoll env` and error texts can say why a value is what it is. A variable
that is set but malformed is an error that names it; a default never hides it. Nor does a misspelt name leave a default
in force without a word: a QUICOLL_* variable that nothing reads is refused (`check_variables`).
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from quicoll.checks import MAX_ADDRESSES, MAX_LANES, MAX_MEMBERS, MAX_NAME, MAX_SECONDS, MAX_WHOLE, whole
from quicoll.errors import LocalError
from quicoll.launchers import Given, master_of, node_of, rank_of, world_size_of
from quicoll.observability.logs import LOG_LEVELS
from quicoll_transport.errors import AddressError, TransportError
from quicoll_transport.net.addresses import is_numeric, is_unspecified, is_v6, parse_address, parse_addresses
from quicoll_transport.net.resolver import Resolver, resolve_all

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

__all__ = [
    "Config",
    "JoinSettings",
    "Setting",
    "check_variables",
    "coordinator_addresses",
    "coordinators_of",
    "lane_hosts",
]


class JoinSettings(TypedDict, total=False):
    """The settings that `quicoll.join` takes, as keyword arguments; `Config` says what each means.

    None stands for a setting that is not given.
    """

    coordinator: str | None
    job: str | None
    node: str | None
    certs: str | os.PathLike[str] | None
    rendezvous: str | os.PathLike[str] | None
    world_size: int | None
    rank_hint: int | None
    seed: int | None
    listen: str | None
    advertise: str | None
    site: str | None
    lost_after: float | None
    timeout: float | None
    join_timeout: float | None
    hold_timeout: float | None
    handle_sigterm: bool | None
    stop_timeout: float | None
    chunk_bytes: int | None
    state_check_every: int | None
    learn_from_bytes: int | None
    straggler_after: float | None
    events: str | os.PathLike[str] | None
    transport_events: bool | None
    qlog: str | os.PathLike[str] | None
    flight_dir: str | os.PathLike[str] | None
    trace_dir: str | os.PathLike[str] | None
    telemetry: bool | None
    metrics: str | None
    late_stacks: bool | None
    log: str | None
    local: bool | None
    engine: str | None
    engine_share: float | str | None
    lanes: int | None
    lane_addresses: str | None
    congestion: str | None
    parity: str | None
    deny: str | os.PathLike[str] | None


_MOST_COORDINATORS = 16
_CONTROLLERS = ("bbr", "cubic", "reno")  # of quicoll_transport.quic.terms, which is not imported to read a setting
_PARITY_MODES = ("auto", "off")  # likewise
_ENGINES = ("thread", "process")
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        value: Its value.
        source: Where it came from: "argument", a variable's name or "default".
    """

    value: Any
    source: str


def _text(value: Any) -> str:
    return str(value)


def _site(value: Any) -> str:
    site = str(value)
    site.encode()  # UnicodeEncodeError, which is a ValueError
    if len(site) > MAX_NAME:
        raise ValueError(f"must be at most {MAX_NAME} characters, not {len(site)}")
    return site


def _integer(value: Any, *, least: int, most: int) -> int:
    number = int(value) if isinstance(value, str) else whole(value, "it")
    if not least <= number <= most:
        raise ValueError(f"must be {f'at least {least}' if number < least else f'at most {most}'}")
    return number


def _seconds(value: Any) -> float:
    given = float(value)
    if not 0 < given < MAX_SECONDS:
        raise ValueError("must be above 0 and below a million seconds")
    return given


def _share(value: Any) -> float | str:
    if value == "auto":
        return "auto"
    try:
        given = float(value)
    except ValueError:
        given = math.nan
    if not 0.01 <= given <= 1:
        raise ValueError('must be "auto", or from 0.01 to 1')
    return given


def _word(value: Any, *, known: tuple[str, ...]) -> str:
    name = str(value)
    if name not in known:
        raise ValueError(f"must be one of {', '.join(known)}")
    return name


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    try:
        return _SWITCH[str(value).lower()]
    except KeyError:
        raise ValueError(f"must be one of {', '.join(_SWITCH)}") from None


def _level(value: Any) -> str:
    level = str(value).lower()
    if level not in LOG_LEVELS:
        raise ValueError(f"must be one of {', '.join(LOG_LEVELS)}")
    return level


def _own_addresses(value: Any) -> str:
    addresses = parse_addresses(str(value))
    for host, _ in addresses:
        if len(addresses) > 1 and not is_numeric(host):
            raise ValueError(f"of several addresses each is a number, not {host!r}")
        if len(addresses) > 1 and is_unspecified(host):
            raise ValueError(f"{host} is every address of this host already; name those that others reach")
    _check_paths(addresses)
    return str(value)


def _check_paths(addresses: Sequence[Address]) -> None:
    if len(addresses) > MAX_ADDRESSES:
        raise ValueError(f"{len(addresses)} addresses of one host are more than {MAX_ADDRESSES}")
    if len(set(addresses)) < len(addresses):
        raise ValueError("one address stands there twice")


def _served(value: Any) -> str:
    given = str(value)
    address = given if ":" in given else f"127.0.0.1:{given}"
    parse_address(address)
    return address


def _own_port(metrics: Setting, environ: Mapping[str, str]) -> Setting:
    """Give each rank of a host a port of its own."""
    local = environ.get("LOCAL_RANK", "")
    host, port = ("", 0) if metrics.value is None else parse_address(metrics.value)
    if not port or not local.isdecimal():
        return metrics
    port += int(local)
    if port > 65535:
        raise LocalError(f"metrics = {metrics.value!r} (from {metrics.source}): LOCAL_RANK={local} makes it {port}")
    return Setting(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", f"{metrics.source}, LOCAL_RANK")


def coordinator_addresses(coordinator: str) -> list[Address]:
    """Return all addresses of the setting `coordinator`, in their order, whosever they are.

    Args:
        coordinator: As in `coordinators_of`.
    Raises:
        AddressError: One is malformed.
    """
    return [address for each in coordinators_of(coordinator) for address in each]


def coordinators_of(coordinator: str) -> list[list[Address]]:
    """Return the addresses of each coordinator that the setting `coordinator` names.

    Args:
        coordinator: "host:port", or several with commas between them; of one that is reached at several addresses
            these, with plus signs between them.
    Raises:
        AddressError: One is malformed.
    """
    return [list(parse_addresses(part)) for part in coordinator.split(",")]


def _destinations(value: Any) -> str:
    """Check addresses that datagrams are sent to. One that a coordinator listens at may be no such address."""
    addresses = coordinator_addresses(str(value))
    for host, port, *_ in addresses:
        if is_unspecified(host):
            raise ValueError(
                f"{host} is every address of a host: a coordinator may listen there, ranks need one of them"
            )
        if port == 0:
            raise ValueError("port 0 lets a coordinator choose; ranks need the port that it has chosen")
    coordinators = coordinators_of(str(value))
    for each in coordinators:
        _check_paths(each)
    if len(coordinators) > _MOST_COORDINATORS:
        raise ValueError(f"{len(coordinators)} coordinators are more than {_MOST_COORDINATORS}")
    return str(value)


def _advertised(value: Any) -> str:
    """Check an address that other ranks send to. Port 0 stands for the one that is bound."""
    addresses = parse_addresses(str(value))
    for host, _ in addresses:
        if is_unspecified(host):
            raise ValueError(f"{host} is every address of a host; other ranks need one that leads here")
    _check_paths(addresses)
    return str(value)


def lane_hosts(addresses: str) -> list[str]:
    """Return the addresses of the setting `lane_addresses`, in their order.

    Args:
        addresses: Numeric addresses of this host without ports, with commas between them.
    Raises:
        ValueError: One is malformed, or stands there twice.
    """
    found = [str(ipaddress.ip_address(part.strip())) for part in addresses.split(",")]
    if len(set(found)) < len(found):
        raise ValueError("one address stands there twice")
    return found


def _own_hosts(value: Any) -> str:
    """Check addresses at which lanes listen; other ranks send there."""
    hosts = lane_hosts(str(value))
    for host in hosts:
        if is_unspecified(host):
            raise ValueError(f"{host} is every address of a host; a lane has one of them")
        if is_v6((host,)) and ipaddress.ip_address(host).is_link_local:
            raise ValueError(f"{host} is a link-local address, which other ranks cannot reach")
    if len(hosts) > MAX_LANES:
        raise ValueError(f"a rank has {MAX_LANES} lanes at most, not {len(hosts)}")
    return str(value)


def _each_a_lane(lanes: Setting, addresses: Setting) -> Setting:
    """Have a lane for each address, where nobody says how many; refuse addresses that no lane would have."""
    if addresses.value is None:
        return lanes
    count = len(lane_hosts(addresses.value))
    if lanes.source == "default":
        return Setting(count, addresses.source)
    if lanes.value < count:
        raise LocalError(
            f"lane_addresses = {addresses.value!r} (from {addresses.source}): {count} addresses are more than "
            f"lanes = {lanes.value} (from {lanes.source})"
        )
    return lanes


def _run_id(environ: Mapping[str, str]) -> Given | None:
    run = environ.get("TORCHELASTIC_RUN_ID")
    return Given(run, "TORCHELASTIC_RUN_ID") if run else None


@dataclass(frozen=True, slots=True)
class _Field:
    convert: Callable[[Any], Any]
    default: Any
    derive: Callable[[Mapping[str, str]], Given | None] | None = None  # from what a launcher says


_FIELDS: dict[str, _Field] = {
    "coordinator": _Field(_destinations, "127.0.0.1:4433", master_of),
    "job": _Field(_text, "job", _run_id),
    "node": _Field(_text, None, node_of),
    "certs": _Field(_text, "certs"),
    "rendezvous": _Field(_text, None),
    "world_size": _Field(partial(_integer, least=1, most=MAX_MEMBERS), None, world_size_of),
    "rank_hint": _Field(partial(_integer, least=0, most=MAX_WHOLE), None, rank_of),
    "seed": _Field(partial(_integer, least=0, most=MAX_WHOLE), None),
    "listen": _Field(_own_addresses, None),
    "advertise": _Field(_advertised, None),
    "site": _Field(_site, ""),
    "lost_after": _Field(_seconds, 2.0),
    "timeout": _Field(_seconds, 300.0),
    "join_timeout": _Field(_seconds, 60.0),
    "hold_timeout": _Field(_seconds, 600.0),
    "handle_sigterm": _Field(_switch, None),
    "stop_timeout": _Field(_seconds, 5.0),
    "chunk_bytes": _Field(partial(_integer, least=1, most=1 << 40), 1 << 20),
    "state_check_every": _Field(partial(_integer, least=0, most=MAX_WHOLE), 100),
    "learn_from_bytes": _Field(partial(_integer, least=0, most=MAX_WHOLE), 64 << 20),
    "straggler_after": _Field(_seconds, 0.25),
    "events": _Field(_text, None),
    "transport_events": _Field(_switch, False),
    "qlog": _Field(_text, None),
    "flight_dir": _Field(_text, None),
    "trace_dir": _Field(_text, None),
    "telemetry": _Field(_switch, False),
    "metrics": _Field(_served, None),
    "late_stacks": _Field(_switch, True),
    "log": _Field(_level, None),
    "local": _Field(_switch, True),
    "engine": _Field(partial(_word, known=_ENGINES), "thread"),
    "engine_share": _Field(_share, "auto"),
    "lanes": _Field(partial(_integer, least=0, most=MAX_LANES), 0),
    "lane_addresses": _Field(_own_hosts, None),
    "congestion": _Field(partial(_word, known=_CONTROLLERS), "cubic"),
    "parity": _Field(partial(_word, known=_PARITY_MODES), "auto"),
    "deny": _Field(_text, None),
}

_PREFIX = "QUICOLL_"
_TEST_PREFIX = "QUICOLL_TEST_"
_OTHERS = ("QUICOLL_RESTARTS", "QUICOLL_JOURNAL")
"""Variables that are no setting of a rank: `quicoll run` sets the first for its children, `quicoll coordinator` reads
the second, in which a database's password can be given that a command line would show."""
_OF_KUBERNETES = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)?)")
"""What every container of a namespace gets for a service there, which may well be called quicoll or quicoll-coordinator
(https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables)."""


def check_variables(environ: Mapping[str, str]) -> None:
    """Refuse QUICOLL_* variables that nothing reads: one of them is a setting misspelt, and not in force.

    Left alone are those that begin with QUICOLL_TEST_, which belong to quicoll's own tests and benchmarks, and those
    that Kubernetes makes of a service's name.

    Args:
        environ: The environment.
    Raises:
        LocalError: There is such a variable; the error has the name that it comes nearest to.
    """
    known = [*map(_variable, _FIELDS), *_OTHERS]
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name.startswith(_TEST_PREFIX) or name in known:
            continue
        if not _OF_KUBERNETES.fullmatch(name):
            ends = [each.removeprefix(_PREFIX) for each in known]  # what all have in common would make all alike
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), ends, n=1)
            hint = f"did you mean {_PREFIX}{near[0]}?" if near else f"there are {', '.join(known)}"
            raise LocalError(f"the variable {name} is none of quicoll's; {hint}")


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one rank. Durations are seconds, sizes bytes.

    Attributes:
        coordinator: "host:port" of the coordinator; of several that take over from each other, with commas between
            them.
        job: The job's name, as in the certificates.
        node: This rank's name; certs/worker-<node>.pem is its certificate.
        certs: Directory of certificates.
        rendezvous: Directory that all ranks of a launch share, where they agree on a coordinator and certificates of
            their own; only where neither of these is named. None: torchrun's store under torchrun, and else no such.
        world_size: Ranks that the first view waits for; None leaves it to the coordinator.
        rank_hint: The rank that this node would like to have.
        seed: The job's seed that this rank insists on; None takes the job's (`Job.seed`), whatever it is.
        listen: "host:port" at which other ranks reach this one, port 0 for a free one. None takes the address that
            leads to the coordinator and a free port; so does "0.0.0.0:port" or "[::]:port" with that port, because
            ranks send each other the address they listen at, and "every address" is nowhere to send to. A host with
            several networks or providers names an address at each, with plus signs between them and in the same order
            as the other hosts; while one of them is reached, nothing is lost.
        advertise: "host:port" that other ranks are told to send to, where that is not `listen`: behind NAT, or in a
            container whose ports are mapped. A port that is mapped leads to one port here, which `listen` then names;
            port 0 stands for the port that is bound, where a whole address is mapped. One for each of `listen`. None:
            `listen` itself.
        site: Name of the place, for hierarchical algorithms.
        lost_after: Silence after which a peer is lost.
        timeout: Of one collective. It finds code paths that differ, not dead peers, so it is longer than the longest
            computation between two calls.
        join_timeout: Until the first view.
        hold_timeout: How long a cut-off rank waits for a quorum.
        handle_sigterm: Whether SIGTERM asks this rank to stop (`Job.stop`) instead of ending the process where it is.
            False: never; None: only within `quicoll.train.Worker.run`.
        stop_timeout: How long the open step may go on once this rank is asked to stop, until it is given up.
        chunk_bytes: Size of the messages in which a large tensor travels.
        state_check_every: Committed steps from one comparison of all ranks' states to the next, beside those when a
            view begins and after its first step; 0 compares only when it begins. Where ranks set different ones, the
            lowest rank's holds.
        learn_from_bytes: Size of a state from which on a rank that is behind first learns it outside of views, while
            the others go on; 0: it is always handed over while they wait. Where ranks set different ones, the lowest
            rank's holds.
        straggler_after: How much later than most a rank calls a collective to be reported as a straggler.
        events: Directory for one JSON-lines file of events for each node; None writes none.
        transport_events: Whether the transport's own events (connections, suspicion, resends, refusals) are reported
            as well.
        qlog: Directory for a qlog trace of each QUIC connection; None writes none, as it costs CPU time.
        flight_dir: Directory for one file of each process with what it did last, written when something fails (`quicoll
            post-mortem`); None keeps and writes nothing.
        trace_dir: Directory for one file of each process with all that it does, for a timeline (`quicoll trace`); None
            writes none.
        telemetry: Whether OpenTelemetry gets figures, and a span for each step and operation.
        metrics: "port", at the loopback address, or "host:port", at which figures are served for Prometheus; where a
            launcher says LOCAL_RANK, that is added to the port. None serves none.
        late_stacks: Whether a rank that is late tells those who wait for it where its threads are, and asks others.
        log: From which level on what quicoll logs is heard, on stderr where the program has no handler: "debug",
            "info", "warning" or "error"; None leaves logging to the program.
        local: Whether ranks that share a host hand each other what they can through its memory.
        engine: Where the engine runs: "thread", beside the program, whose lock it takes; or "process", one of its own,
            which steps back behind the program. Then nothing of this rank goes through the memory of its host.
        engine_share: Part of the time that the engine's thread takes at most while other threads of the program compute
            and none waits for it; 1 is no bound. "auto": 0.07, for calls that go through the memory of a host alone,
            and for 0.2 s at a time.
        lanes: Processes beside this one that carry its long messages, each with connections of its own; 0 has none.
            Where it is not given, as many as there are `lane_addresses`.
        lane_addresses: Numeric addresses of this host, with commas between them, at which its lanes listen and from
            which they send, in turn. Lanes of one number meet, so each host names its addresses in the order of the
            providers or networks. None: all at that of `listen`.
        congestion: Congestion control of this rank's connections: cubic, reno, or bbr for paths that lose packets.
        parity: "auto" lets parity follow what is sent with bbr over a long path that loses packets, so that what is
            lost at the end need not be sent again, and takes it from others; "off" does neither.
        deny: File of SHA-256 fingerprints of certificates that may not come in; None denies none.
        sources: By setting, where its value came from.
    """

    coordinator: str
    job: str
    node: str
    certs: str
    rendezvous: str | None
    world_size: int | None
    rank_hint: int | None
    seed: int | None
    listen: str
    advertise: str | None
    site: str
    lost_after: float
    timeout: float
    join_timeout: float
    hold_timeout: float
    handle_sigterm: bool | None
    stop_timeout: float
    chunk_bytes: int
    state_check_every: int
    learn_from_bytes: int
    straggler_after: float
    events: str | None
    transport_events: bool
    qlog: str | None
    flight_dir: str | None
    trace_dir: str | None
    telemetry: bool
    metrics: str | None
    late_stacks: bool
    log: str | None
    local: bool
    engine: str
    engine_share: float | str
    lanes: int
    lane_addresses: str | None
    congestion: str
    parity: str
    deny: str | None
    sources: Mapping[str, str]

    @classmethod
    def resolve(cls, *, environ: Mapping[str, str] | None = None, **arguments: Unpack[JoinSettings]) -> Config:
        """Find the settings: the arguments that are not None, then the environment, then the defaults.

        May look up the coordinator's name, for join_timeout seconds at most.

        Args:
            environ: The environment; None takes this process's.
            **arguments: Settings.
        Raises:
            LocalError: A value is malformed or an argument unknown; the error names the setting and its source.
        """
        settings = cls._settings(environ, arguments)
        if _follows_route(settings["listen"]):
            address, timeout = settings["coordinator"].value, settings["join_timeout"].value
            found: list[Address] = []
            failed: TransportError | None = None
            addresses = coordinator_addresses(address)
            for host, port, *_ in addresses:
                try:
                    found += Resolver().resolve_blocking(str(host), int(port), timeout=timeout / len(addresses))
                except TransportError as error:
                    failed = failed or error
            if not found:
                raise _no_route(address, failed) from failed
            settings["listen"] = _reachable(settings["listen"], address, found)
        return cls._of(settings)

    @classmethod
    def named(cls, *, environ: Mapping[str, str] | None = None, **arguments: Unpack[JoinSettings]) -> Config:
        """Find the settings that can be found without a coordinator: `listen` is "" where its address would be taken.

        Args:
            environ: As in `resolve`.
            **arguments: As in `resolve`.
        Raises:
            LocalError: As `resolve`.
        """
        settings = cls._settings(environ, arguments)
        if settings["listen"].value is None:
            settings["listen"] = Setting("", "default")
        return cls._of(settings)

    @classmethod
    async def resolve_in_loop(
        cls, *, environ: Mapping[str, str] | None = None, **arguments: Unpack[JoinSettings]
    ) -> Config:
        """Do the same as `resolve` in an event loop, which goes on while the name is looked up.

        Takes no thread of the loop's executor: the program may have filled that with work of its own.
        """
        settings = cls._settings(environ, arguments)
        if _follows_route(settings["listen"]):
            address, timeout = settings["coordinator"].value, settings["join_timeout"].value
            found, failed = await resolve_all(coordinator_addresses(address), Resolver().resolve, timeout=timeout)
            if failed and not found:
                raise _no_route(address, AddressError(failed[0]))
            settings["listen"] = _reachable(settings["listen"], address, found)
        return cls._of(settings)

    @classmethod
    def _settings(cls, environ: Mapping[str, str] | None, arguments: Mapping[str, Any]) -> dict[str, Setting]:
        environ = os.environ if environ is None else environ
        check_variables(environ)
        unknown = sorted(set(arguments) - set(_FIELDS))
        if unknown:
            raise LocalError(f"unknown setting {unknown[0]!r}; there are {', '.join(_FIELDS)}")
        settings = {name: _find(name, field, arguments.get(name), environ) for name, field in _FIELDS.items()}
        if settings["node"].value is None:
            settings["node"] = Setting(socket.gethostname().split(".")[0] or "node", "host name")
        settings["metrics"] = _own_port(settings["metrics"], environ)
        settings["lanes"] = _each_a_lane(settings["lanes"], settings["lane_addresses"])
        if not _follows_route(settings["listen"]):
            for host, _ in parse_addresses(settings["listen"].value):
                _refuse_link_local(host, settings["listen"].source)
        _check_advertised(settings["advertise"], settings["listen"])
        return settings

    @classmethod
    def _of(cls, settings: Mapping[str, Setting]) -> Config:
        values = {name: setting.value for name, setting in settings.items()}
        return cls(**values, sources={name: setting.source for name, setting in settings.items()})


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


def _find(name: str, field: _Field, argument: Any, environ: Mapping[str, str]) -> Setting:
    variable = _variable(name)
    if argument is not None:
        value, source = argument, "argument"
    elif environ.get(variable):
        value, source = environ[variable], variable
    elif field.derive is not None and (told := field.derive(environ)) is not None:
        value, source = told.value, told.source
    else:
        return Setting(field.default, "default")
    try:
        return Setting(field.convert(value), source)
    except (TypeError, ValueError, TransportError) as error:
        raise LocalError(f"{name} = {value!r} (from {source}): {error}") from error


def _follows_route(listen: Setting) -> bool:
    """Return True if the address that leads to the coordinator is to be taken: none is named, or all of this host."""
    return listen.value is None or is_unspecified(parse_addresses(listen.value)[0][0])


def _check_advertised(advertise: Setting, listen: Setting) -> None:
    """Refuse a mapped port that leads to a port which is not known before it is bound."""
    if advertise.value is None:
        return
    told = parse_addresses(advertise.value)
    bound = [("", 0)] if listen.value is None else parse_addresses(listen.value)
    if len(told) != len(bound):
        raise LocalError(
            f"advertise = {advertise.value!r} (from {advertise.source}): {len(told)} addresses, and listen has "
            f"{len(bound)}; each of these is told as one"
        )
    for (host, port), (_, own) in zip(told, bound, strict=True):
        _refuse_link_local(host, advertise.source, "advertise")
        if not port or own:
            continue
        raise LocalError(
            f"advertise = {advertise.value!r} (from {advertise.source}): port {port} leads to one port of this host, "
            "so listen has to name that one, as in 0.0.0.0:5000; where all ports are mapped alike, advertise port 0"
        )


def _refuse_link_local(host: str, source: str, name: str = "listen") -> None:
    """Refuse a link-local address: an interface's number means something on its own host only (RFC 4007 section 6)."""
    if is_v6((host,)) and ipaddress.ip_address(host).is_link_local:
        raise LocalError(
            f"{name} = {host!r} (from {source}): other ranks cannot reach a link-local address, since each would have "
            "to name its own interface; give this host and the coordinator addresses of another kind"
        )


def _reachable(listen: Setting, coordinator: str, targets: Sequence[Address]) -> Setting:
    """Return the address of ours that leads to the coordinator, as a setting; other ranks can send to it.

    It is the one that is bound too, so the announced address and the served one cannot differ.

    Args:
        listen: The setting as it was given.
        coordinator: The coordinator's name and port, for errors.
        targets: The coordinator's addresses.
    """
    wanted, port = ("", 0) if listen.value is None else parse_address(listen.value)
    host = _route_to(coordinator, targets)
    _refuse_link_local(host, "route to the coordinator")
    if wanted and ":" not in wanted and ":" in host:
        raise LocalError(
            f"listen = {listen.value!r} (from {listen.source}) is IPv4, and the way to the coordinator at "
            f"{coordinator} is IPv6; take [::]:{port}"
        )
    source = f"{listen.source}, route to the coordinator" if wanted else "route to the coordinator"
    return Setting(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", source)


def _route_to(address: str, targets: Sequence[Address]) -> str:
    """Return our address on the way to `targets`. Connecting a UDP socket asks the routing table and sends nothing."""
    failed: Exception | None = None
    for target in targets:
        try:
            with socket.socket(socket.AF_INET6 if is_v6(target) else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:  # a name may stand for addresses of a family that this host has not
            failed = failed or error
    raise _no_route(address, failed) from failed


def _no_route(address: str, error: Exception | None) -> LocalError:
    return LocalError(f"no route to the coordinator at {address}: {error}")
