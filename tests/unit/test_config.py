"""Where settings come from, and what a malformed one says."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from networks import needs_v6

import quicoll
from quicoll import Config, LocalError, blocking, testing
from quicoll.config import JoinSettings, check_variables, coordinator_addresses, coordinators_of
from quicoll.engine.engine import announced_addresses
from quicoll_transport.quic.terms import CONTROLLERS, PARITY_MODES

LOCAL = {"listen": "127.0.0.1:0"}


def test_an_argument_beats_the_environment_which_beats_torchrun_which_beats_the_default() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    config = Config.resolve(environ=torchrun, **LOCAL)
    assert (config.node, config.world_size, config.coordinator) == ("worker-3", 8, "127.0.0.1:29500")
    assert config.sources["node"] == "RANK"
    assert (config.timeout, config.sources["timeout"]) == (300.0, "default")

    config = Config.resolve(environ={**torchrun, "QUICOLL_NODE": "a", "QUICOLL_WORLD_SIZE": "2"}, **LOCAL)
    assert (config.node, config.world_size, config.rank_hint) == ("a", 2, 3)
    assert config.sources["node"] == "QUICOLL_NODE"

    config = Config.resolve(environ={**torchrun, "QUICOLL_NODE": "a"}, node="b", timeout=1.5, **LOCAL)
    assert (config.node, config.sources["node"], config.timeout) == ("b", "argument", 1.5)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("QUICOLL_WORLD_SIZE", "many", "world_size = 'many' \\(from QUICOLL_WORLD_SIZE\\)"),
        ("QUICOLL_WORLD_SIZE", "0", "at least 1"),
        ("QUICOLL_COORDINATOR", "nowhere", "not host:port"),
        ("QUICOLL_LOST_AFTER", "-1", "above 0"),
        ("QUICOLL_TIMEOUT", "nan", "above 0"),
        ("QUICOLL_ENGINE_SHARE", "often", 'must be "auto", or from 0.01 to 1'),
        ("QUICOLL_ENGINE_SHARE", "nan", 'must be "auto", or from 0.01 to 1'),
        ("RANK", "x", "rank_hint = 'x' \\(from RANK\\)"),
        ("RANK", "-1", "rank_hint = '-1' \\(from RANK\\): must be at least 0"),
        ("QUICOLL_WORLD_SIZE", "1025", "at most 1024"),
        ("QUICOLL_CHUNK_BYTES", "0", "at least 1"),
        ("QUICOLL_SITE", "x" * 129, "at most 128 characters"),
        ("QUICOLL_ADVERTISE", "203.0.113.5", "not host:port"),
        ("QUICOLL_ADVERTISE", "0.0.0.0:7", "every address of a host"),
        ("QUICOLL_ADVERTISE", "[fe80::1]:0", "advertise = 'fe80::1' \\(from QUICOLL_ADVERTISE\\): .* link-local"),
        ("QUICOLL_ADVERTISE", "203.0.113.5:7", "so listen has to name that one"),
        ("QUICOLL_ADVERTISE", "203.0.113.5:0+203.0.113.6:0", "2 addresses, and listen has 1"),
        ("QUICOLL_COORDINATOR", "10.0.0.1:1+10.0.0.1:1", "one address stands there twice"),
        ("QUICOLL_COORDINATOR", "10.0.0.1:1+nowhere", "not host:port"),
    ],
)
def test_a_malformed_value_is_named_with_its_source(variable: str, value: str, said: str) -> None:
    with pytest.raises(LocalError, match=said):
        Config.resolve(environ={variable: value}, **LOCAL)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("world_size", 2.5, "must be an integer, not 2.5"),
        ("world_size", True, "must be an integer"),
        ("world_size", 1025, "at most 1024"),
        ("rank_hint", 1.0, "must be an integer, not 1.0"),
        ("rank_hint", -1, "at least 0"),
        ("rank_hint", 1 << 70, "at most 9223372036854775807"),
        ("site", "x" * 129, "at most 128 characters, not 129"),
        ("site", "\ud800", "surrogates not allowed"),
    ],
)
def test_what_no_coordinator_could_be_told_is_refused_here_and_not_waited_for(
    name: str, value: object, said: str
) -> None:
    with pytest.raises(LocalError, match=f"{name} = .*from argument.*{said}"):
        Config.resolve(environ={}, **LOCAL, **{name: value})


def test_an_unknown_setting_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(LocalError, match=r"unknown setting 'lostafter'.*lost_after"):
        Config.resolve(environ={}, lostafter=1)


def test_a_mapped_port_goes_with_the_port_that_it_leads_to() -> None:
    config = Config.resolve(environ={}, listen="127.0.0.1:5000", advertise="203.0.113.5:7000")
    assert (config.listen, config.advertise) == ("127.0.0.1:5000", "203.0.113.5:7000")
    config = Config.resolve(environ={"QUICOLL_ADVERTISE": "gate.example.org:0"}, **LOCAL)  # every port, as it is
    assert config.advertise == "gate.example.org:0"
    config = Config.resolve(environ={}, listen="0.0.0.0:5000", advertise="203.0.113.5:7000", coordinator="127.0.0.1:9")
    assert config.listen == "127.0.0.1:5000"


def kinds(annotation: Any) -> set[Any]:
    """The types of a setting, of those that may be left out and of paths without these."""
    return {kind for kind in get_args(annotation) or (annotation,) if kind not in (NoneType, os.PathLike[str])}


def test_the_settings_that_editors_show_are_those_there_are_in_their_order_and_types() -> None:
    shown, held = get_type_hints(JoinSettings), get_type_hints(Config)
    sources = Config.resolve(environ={}, **LOCAL).sources
    assert list(shown) == list(sources) == [each.name for each in dataclasses.fields(Config) if each.name != "sources"]
    assert {name: kinds(shown[name]) for name in shown} == {name: kinds(held[name]) for name in shown}
    assert JoinSettings.__optional_keys__ == set(shown)
    assert all(NoneType in get_args(annotation) for annotation in shown.values())


@pytest.mark.parametrize(
    "function", [quicoll.join, blocking.join, testing.cluster, Config.resolve, Config.resolve_in_loop]
)
def test_what_takes_settings_names_them_for_type_checkers(function: Callable[..., Any]) -> None:
    *_, settings = inspect.signature(function).parameters.values()
    assert (settings.kind, settings.annotation) == (inspect.Parameter.VAR_KEYWORD, "Unpack[JoinSettings]")


def test_a_path_is_taken_for_a_directory(tmp_path: Path) -> None:
    config = Config.resolve(environ={}, certs=tmp_path, events=tmp_path / "events", **LOCAL)
    assert (config.certs, config.events) == (str(tmp_path), f"{tmp_path}/events")


def test_an_ipv6_master_address_is_bracketed() -> None:
    config = Config.resolve(environ={"MASTER_ADDR": "::1", "MASTER_PORT": "1"}, **LOCAL)
    assert config.coordinator == "[::1]:1"


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("10.0.0.7:0+0.0.0.0:0", "every address of this host already"),
        ("10.0.0.7:0+name:0", "each is a number, not 'name'"),
        ("10.0.0.7:0+10.0.0.7:0", "stands there twice"),
        ("10.0.0.7:0+[fe80::1]:0", "link-local"),
        ("+".join(f"10.{number}.0.7:0" for number in range(5)), "more than 4"),
        ("10.0.0.7:0+", "not host:port"),
    ],
)
def test_addresses_of_one_host_that_cannot_be_are_refused(listen: str, said: str) -> None:
    with pytest.raises(LocalError, match=said):
        Config.resolve(environ={"QUICOLL_LISTEN": listen})


def test_a_host_may_have_several_addresses_and_so_may_a_coordinator() -> None:
    told = "10.0.0.1:4433+10.1.0.1:4433,10.0.0.2:4433"
    config = Config.resolve(
        environ={}, listen="10.0.0.7:0+10.1.0.7:0", advertise="203.0.113.5:0+198.51.100.5:0", coordinator=told
    )
    assert config.listen == "10.0.0.7:0+10.1.0.7:0"
    assert coordinators_of(config.coordinator) == [[("10.0.0.1", 4433), ("10.1.0.1", 4433)], [("10.0.0.2", 4433)]]
    assert len(coordinator_addresses(config.coordinator)) == 3
    bound = [("10.0.0.7", 71), ("10.1.0.7", 72)]
    assert announced_addresses(config, bound) == (("203.0.113.5", 71), ("198.51.100.5", 72))


def test_without_a_listen_address_the_one_towards_the_coordinator_is_taken() -> None:
    config = Config.resolve(environ={}, coordinator="127.0.0.1:9")
    assert config.listen == "127.0.0.1:0"


@pytest.mark.parametrize(("listen", "bound"), [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "127.0.0.1:7")])
def test_every_address_becomes_the_one_that_leads_to_the_coordinator_since_others_are_told_it(
    listen: str, bound: str
) -> None:
    config = Config.resolve(environ={"QUICOLL_LISTEN": listen}, coordinator="127.0.0.1:9")
    assert config.listen == bound
    assert config.sources["listen"] == "QUICOLL_LISTEN, route to the coordinator"


@needs_v6
def test_every_ipv4_address_cannot_lead_to_a_coordinator_on_ipv6() -> None:
    with pytest.raises(LocalError, match=r"listen = '0\.0\.0\.0:7' \(from argument\) is IPv4.*IPv6; take \[::\]:7"):
        Config.resolve(environ={}, coordinator="[::1]:9", listen="0.0.0.0:7")
    assert Config.resolve(environ={}, coordinator="[::1]:9", listen="[::]:7").listen == "[::1]:7"


def test_a_link_local_address_is_refused_because_others_cannot_dial_it() -> None:
    with pytest.raises(LocalError, match=r"'fe80::1%eth0' \(from argument\): other ranks cannot reach a link-local"):
        Config.resolve(environ={}, listen="[fe80::1%eth0]:7")


@pytest.mark.parametrize(
    ("coordinator", "said"),
    [("0.0.0.0:4433", "every address of a host"), ("[::]:4433", "every address"), ("127.0.0.1:0", "port 0")],
)
def test_a_coordinator_is_named_by_where_it_is_reached_not_by_where_it_listens(coordinator: str, said: str) -> None:
    with pytest.raises(LocalError, match=rf"coordinator = .*\(from QUICOLL_COORDINATOR\): .*{said}"):
        Config.resolve(environ={"QUICOLL_COORDINATOR": coordinator}, **LOCAL)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("QUICOLL_LOSTAFTER", r"QUICOLL_LOSTAFTER is none of quicoll's; did you mean QUICOLL_LOST_AFTER\?"),
        ("QUICOLL_SEEDS", r"did you mean QUICOLL_SEED\?"),
        ("QUICOLL_COORDINATER", r"did you mean QUICOLL_COORDINATOR\?"),
        ("QUICOLL_Q", "there are QUICOLL_COORDINATOR, QUICOLL_JOB, "),
        ("QUICOLL_timeout", "the variable QUICOLL_timeout is none"),
    ],
)
def test_a_variable_that_nothing_reads_is_refused_with_the_nearest_name(name: str, said: str) -> None:
    with pytest.raises(LocalError, match=said):
        Config.resolve(environ={name: "1"}, **LOCAL)


def test_variables_of_others_are_left_alone() -> None:
    check_variables({"QUICOLL": "1", "QUICOLLECTION": "1", "quicoll_seed": "1", "QUICOLL_TEST_ORACLE": "2"})
    settings = [f"QUICOLL_{name.upper()}" for name in JoinSettings.__annotations__]
    check_variables(dict.fromkeys(["QUICOLL_RESTARTS", *settings], "1"))


def test_what_kubernetes_makes_of_a_services_name_is_left_alone() -> None:
    ends = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_QUIC", "PORT", "PORT_4433_UDP", "PORT_4433_UDP_ADDR")
    for service in ("QUICOLL", "QUICOLL_COORDINATOR"):
        check_variables({f"{service}_{end}": "10.0.0.1" for end in ends})
    with pytest.raises(LocalError, match="QUICOLL_REPORT is none"):
        check_variables({"QUICOLL_REPORT": "1"})


def test_every_variable_that_the_sources_speak_of_is_known() -> None:
    """Tests and benchmarks too: theirs have a prefix of their own, or nobody could set one and join a job."""
    root = Path(__file__).parents[2]
    tops = ("quicoll", "transport", "tests", "benchmarks", "examples", "docs")
    files = [each for top in tops for each in sorted((root / top).rglob("*")) if each.suffix in (".py", ".md")]
    for path in files:
        if path == Path(__file__):
            continue
        for name in re.findall(r"\bQUICOLL_[A-Z0-9_]*[A-Z0-9]\b", path.read_text()):
            try:
                check_variables({name: ""})
            except LocalError as error:
                pytest.fail(f"{path}: {error}")


def test_parity_is_as_the_transport_has_it() -> None:
    for mode in PARITY_MODES:
        assert Config.named(environ={"QUICOLL_PARITY": mode}).parity == mode
    with pytest.raises(LocalError, match=r"QUICOLL_PARITY\): must be one of auto, off$"):
        Config.named(environ={"QUICOLL_PARITY": "on"})


def test_congestion_control_is_one_that_the_transport_has() -> None:
    for name in CONTROLLERS:
        assert Config.named(environ={"QUICOLL_CONGESTION": name}).congestion == name
    with pytest.raises(LocalError, match=rf"QUICOLL_CONGESTION\): must be one of {', '.join(CONTROLLERS)}$"):
        Config.named(environ={"QUICOLL_CONGESTION": "vegas"})


def test_there_is_a_lane_for_each_address_that_lanes_are_given() -> None:
    def lanes(**settings: Any) -> tuple[int, str]:
        config = Config.resolve(environ={}, **LOCAL, **settings)
        return config.lanes, config.sources["lanes"]

    assert lanes() == (0, "default")
    assert lanes(lane_addresses="10.0.0.7, 2001:db8::7") == (2, "argument")
    assert lanes(lane_addresses="10.0.0.7,10.1.0.7", lanes=4) == (4, "argument")
    with pytest.raises(LocalError, match=r"2 addresses are more than lanes = 1 \(from argument\)"):
        lanes(lane_addresses="10.0.0.7,10.1.0.7", lanes=1)


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        ("ib0", "does not appear to be an IPv4 or IPv6 address"),
        ("10.0.0.7:5000", "does not appear to be an IPv4 or IPv6 address"),
        ("10.0.0.7,", "does not appear to be an IPv4 or IPv6 address"),
        ("10.0.0.7,10.0.0.7", "twice"),
        ("0.0.0.0", "every address of a host"),  # noqa: S104 - it is refused
        ("::", "every address of a host"),
        ("fe80::1", "link-local"),
        (",".join(f"10.0.0.{last}" for last in range(1, 10)), "8 lanes at most, not 9"),
    ],
)
def test_addresses_of_lanes_are_numeric_ones_that_others_can_send_to(addresses: str, said: str) -> None:
    with pytest.raises(LocalError, match=said):
        Config.resolve(environ={"QUICOLL_LANE_ADDRESSES": addresses}, **LOCAL)
