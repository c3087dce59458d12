"""What an operator does with certificates: observers are told of what was done, callers of what was not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quicoll.engine.certificates import Certificates
from quicoll.errors import LocalError
from quicoll_transport.errors import ConfigurationError


class Control:
    """An endpoint's control of access that denies what it is told to, or refuses all."""

    def __init__(self, denied: tuple[str, ...] = (), refusal: str = "") -> None:
        self.denied, self.refusal = denied, refusal

    def renew(self, _: Any) -> tuple[str, ...]:
        if self.refusal:
            raise ConfigurationError(self.refusal)
        return self.denied

    def deny(self, fingerprint: str) -> str:
        if self.refusal:
            raise ConfigurationError(self.refusal)
        return fingerprint.replace(":", "")


def made(**behaviour: Any) -> tuple[Certificates, list[tuple[str, str]]]:
    events: list[tuple[str, str]] = []
    control: Any = Control(**behaviour)
    return Certificates(control, lambda kind, fingerprint: events.append((kind, fingerprint))), events


def access(fingerprint: str) -> Any:
    return SimpleNamespace(credentials=SimpleNamespace(fingerprint=fingerprint))


async def test_a_new_certificate_is_told_first_and_then_those_that_are_denied_with_it() -> None:
    certificates, events = made(denied=("bb", "cc"))
    assert await certificates.rotate(access("aa")) == "aa"
    assert events == [("certificates_rotated", "aa"), ("certificate_denied", "bb"), ("certificate_denied", "cc")]


async def test_a_certificate_that_is_shut_out_is_told_in_plain_form() -> None:
    certificates, events = made()
    await certificates.deny("aa:bb")
    assert events == [("certificate_denied", "aabb")]


async def test_what_is_refused_is_an_error_of_the_caller_and_no_event() -> None:
    certificates, events = made(refusal="it is another node's")
    with pytest.raises(LocalError, match="another node's"):
        await certificates.rotate(access("aa"))
    with pytest.raises(LocalError, match="another node's"):
        await certificates.deny("aa")
    assert events == []
