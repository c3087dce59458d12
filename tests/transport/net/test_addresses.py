"""Addresses: one form for each, read and shown."""

from __future__ import annotations

import pytest

from quicoll_transport.errors import AddressError
from quicoll_transport.net.addresses import Address, canonical, format_address, parse_address


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (("192.0.2.1", 1), ("192.0.2.1", 1)),
        (("::ffff:192.0.2.1", 1, 0, 0), ("192.0.2.1", 1)),
        (("::FFFF:C000:201", 1), ("192.0.2.1", 1)),
        (("2001:DB8:0::1", 1), ("2001:db8::1", 1, 0, 0)),
        (("2001:db8::1", 1, 77, 0), ("2001:db8::1", 1, 0, 0)),
        (("fe80::1%2", 1, 0, 2), ("fe80::1", 1, 0, 2)),
        (("fe80::1%2", 1), ("fe80::1", 1, 0, 2)),
        (("fe80::1", 1, 0, 2), ("fe80::1", 1, 0, 2)),
        (("host.example", 1), ("host.example", 1)),
    ],
)
def test_an_address_has_one_form(given: Address, form: Address) -> None:
    assert canonical(given) == form
    assert canonical(form) == form


def test_a_zone_that_is_no_interface_is_named() -> None:
    with pytest.raises(AddressError, match="no interface 'nowhere0'"):
        canonical(("fe80::1%nowhere0", 1))


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (("192.0.2.1", 1), "192.0.2.1:1"),
        (("2001:db8::1", 1, 0, 0), "[2001:db8::1]:1"),
        (("fe80::1", 1, 0, 2), "[fe80::1%2]:1"),
        (("host", 1), "host:1"),
    ],
)
def test_an_address_is_shown_as_it_is_written(address: Address, text: str) -> None:
    assert format_address(address) == text
    assert canonical(parse_address(text)) == address


@pytest.mark.parametrize("text", ["::1", "2001:db8::1:80", "1:2:3"])
def test_an_ipv6_address_without_brackets_is_ambiguous_and_refused(text: str) -> None:
    with pytest.raises(AddressError, match="brackets"):
        parse_address(text)


@pytest.mark.parametrize("text", ["::1", "[::1]"])
def test_an_ipv6_address_alone_takes_the_default_port(text: str) -> None:
    assert parse_address(text, default_port=9) == ("::1", 9)
