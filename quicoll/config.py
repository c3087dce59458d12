"""Where the settings of a job come from: argument > QUICOLL_* > torchrun's variables > default.

Every value remembers its source, so that `quicoll env` and error texts can say why a value is what it is. A variable
that is set but malformed is an error that names it; a default never hides it.
"""

from __future__ import annotations

import operator
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quicoll.checks import MAX_MEMBERS, MAX_NAME, MAX_SECONDS
from quicoll.errors import LocalError
from quicoll_transport.addresses import is_v6, parse_address
from quicoll_transport.errors import AddressError, TransportError
from quicoll_transport.names import Resolver, resolve_all

if TYPE_CHECKING:
    from quicoll_transport.quic import Address

__all__ = ["Config", "Setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its value as text or object, and where it came from ("argument", a variable's name, "default")."""

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


def _integer(value: Any) -> int:
    """Of text too; but neither 2.5 nor True, which `int` would take."""
    if isinstance(value, str):
        return int(value)
    if isinstance(value, bool):
        raise TypeError("must be an integer")
    return operator.index(value)


def _rank_hint(value: Any) -> int:
    rank = _integer(value)
    if not 0 <= rank < MAX_MEMBERS:
        raise ValueError(f"must be from 0 to {MAX_MEMBERS - 1}")
    return rank


def _world_size(value: Any) -> int:
    size = _count(value)
    if size > MAX_MEMBERS:
        raise ValueError(f"must be at most {MAX_MEMBERS}")
    return size


def _seconds(value: Any) -> float:
    given = float(value)
    if not 0 < given < MAX_SECONDS:
        raise ValueError("must be above 0 and below a million seconds")
    return given


def _count(value: Any) -> int:
    count = _integer(value)
    if count < 1:
        raise ValueError("must be at least 1")
    return count


def _address(value: Any) -> str:
    parse_address(str(value))
    return str(value)


def _rank_node(environ: Mapping[str, str]) -> str | None:
    rank = environ.get("RANK")
    return f"worker-{rank}" if rank is not None else None


def _master(environ: Mapping[str, str]) -> str | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host is None or port is None:
        return None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class _Field:
    convert: Callable[[Any], Any]
    default: Any
    torchrun: str = ""  # the variable of torchrun's that gives it, for the source
    derive: Callable[[Mapping[str, str]], str | None] | None = None


_FIELDS: dict[str, _Field] = {
    "coordinator": _Field(_address, "127.0.0.1:4433", "MASTER_ADDR, MASTER_PORT", _master),
    "job": _Field(_text, "job", "TORCHELASTIC_RUN_ID", lambda env: env.get("TORCHELASTIC_RUN_ID")),
    "node": _Field(_text, None, "RANK", _rank_node),
    "certs": _Field(_text, "certs"),
    "world_size": _Field(_world_size, None, "WORLD_SIZE", lambda env: env.get("WORLD_SIZE")),
    "rank_hint": _Field(_rank_hint, None, "RANK", lambda env: env.get("RANK")),
    "listen": _Field(_address, None),
    "site": _Field(_site, ""),
    "lost_after": _Field(_seconds, 2.0),
    "timeout": _Field(_seconds, 300.0),
    "join_timeout": _Field(_seconds, 60.0),
    "hold_timeout": _Field(_seconds, 600.0),
    "chunk_bytes": _Field(_count, 1 << 20),
    "straggler_after": _Field(_seconds, 0.25),
    "events": _Field(_text, None),
}


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one rank. Durations are seconds, sizes bytes.

    coordinator: "host:port" of the coordinator. job: the job's name, as in the certificates.
    node: this rank's name; certs/worker-<node>.pem is its certificate. certs: directory of certificates.
    world_size: ranks that the first view waits for; None leaves it to the coordinator. rank_hint: wished rank.
    listen: "host:port" that other ranks reach this one at; None takes the address that leads to the coordinator
    and a free port. site: name of the place, for hierarchical algorithms.
    lost_after: silence after which a peer is lost. timeout: of one collective; it finds code paths that differ, not
    dead peers, so it is longer than the longest computation between two calls. join_timeout: until the first view.
    hold_timeout: how long a cut-off rank waits for a quorum. chunk_bytes: of a large tensor, one message each.
    straggler_after: how much later than most a rank calls a collective to be reported as a straggler.
    events: directory for one JSON-lines file of events per node; None writes none.
    """

    coordinator: str
    job: str
    node: str
    certs: str
    world_size: int | None
    rank_hint: int | None
    listen: str
    site: str
    lost_after: float
    timeout: float
    join_timeout: float
    hold_timeout: float
    chunk_bytes: int
    straggler_after: float
    events: str | None
    sources: Mapping[str, str]

    @classmethod
    def resolve(cls, *, environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
        """Settings from the arguments that are not None, then the environment, then defaults.

        May look up the coordinator's name, for `join_timeout` seconds at most. Raises LocalError naming the setting and
        its source when a value is malformed.
        """
        settings = cls._settings(environ, arguments)
        if settings["listen"].value is None:
            address, timeout = settings["coordinator"].value, settings["join_timeout"].value
            try:
                found = Resolver().resolve_blocking(*parse_address(address), timeout=timeout)
            except TransportError as error:
                raise _no_route(address, error) from error
            settings["listen"] = _route_to(address, found)
        return cls._of(settings)

    @classmethod
    async def resolve_in_loop(cls, *, environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
        """`resolve`, for code in an event loop: it goes on while the name is looked up. No thread of the loop's
        executor is taken, which the program may have filled with work of its own."""
        settings = cls._settings(environ, arguments)
        if settings["listen"].value is None:
            address, timeout = settings["coordinator"].value, settings["join_timeout"].value
            found, failed = await resolve_all([parse_address(address)], Resolver().resolve, timeout=timeout)
            if failed:
                raise _no_route(address, AddressError(failed[0]))
            settings["listen"] = _route_to(address, found)
        return cls._of(settings)

    @classmethod
    def _settings(cls, environ: Mapping[str, str] | None, arguments: Mapping[str, Any]) -> dict[str, Setting]:
        environ = os.environ if environ is None else environ
        unknown = sorted(set(arguments) - set(_FIELDS))
        if unknown:
            raise LocalError(f"unknown setting {unknown[0]!r}; there are {', '.join(_FIELDS)}")
        settings = {name: _find(name, field, arguments.get(name), environ) for name, field in _FIELDS.items()}
        if settings["node"].value is None:
            settings["node"] = Setting(socket.gethostname().split(".")[0] or "node", "host name")
        return settings

    @classmethod
    def _of(cls, settings: Mapping[str, Setting]) -> Config:
        values = {name: setting.value for name, setting in settings.items()}
        return cls(**values, sources={name: setting.source for name, setting in settings.items()})


def _find(name: str, field: _Field, argument: Any, environ: Mapping[str, str]) -> Setting:
    variable = f"QUICOLL_{name.upper()}"
    if argument is not None:
        value, source = argument, "argument"
    elif environ.get(variable):
        value, source = environ[variable], variable
    elif field.derive is not None and field.derive(environ):
        value, source = field.derive(environ), field.torchrun
    else:
        return Setting(field.default, "default")
    try:
        return Setting(field.convert(value), source)
    except (TypeError, ValueError, TransportError) as error:
        raise LocalError(f"{name} = {value!r} (from {source}): {error}") from error


def _route_to(address: str, targets: Sequence[Address]) -> Setting:
    """Our address on the way to `address`; connecting a UDP socket asks the routing table and sends nothing."""
    failed: Exception | None = None
    for target in targets:
        try:
            with socket.socket(socket.AF_INET6 if is_v6(target) else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                host = str(probe.getsockname()[0])
        except OSError as error:  # a name may stand for addresses of a family that this host has not
            failed = failed or error
        else:
            return Setting(f"[{host}]:0" if ":" in host else f"{host}:0", "route to the coordinator")
    raise _no_route(address, failed) from failed


def _no_route(address: str, error: Exception | None) -> LocalError:
    return LocalError(f"no route to the coordinator at {address}: {error}")
