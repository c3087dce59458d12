"""The page of a job, as a document: escaped, whole in itself."""

from __future__ import annotations

import re

import pytest

from quicoll.cli.status_page import html_page, page_address
from quicoll.cli.status_words import NodeRow, Picture
from quicoll.errors import LocalError

EVIL = "<script>alert('x')</script>\"&"

PICTURE = Picture(
    job="train",
    condition="held",
    sentence=f"job train: held for 2 s: {EVIL}",
    lines=(f"no view: {EVIL}",),
    rows=(NodeRow(node=EVIL, rank="0", state="lost", step="4", rtt="1.0 ms", note=EVIL, troubled=True),),
    unlisted=3,
    events=(("1 s", EVIL),),
)


def test_all_that_comes_from_elsewhere_is_escaped_and_nothing_is_loaded() -> None:
    page = html_page(PICTURE, every=2.4, stale=EVIL)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 6
    assert '<meta http-equiv="refresh" content="2">' in page
    assert not re.search(r"(src|href|url\(|@import)", page)
    assert '<span class="badge bad">held</span> job train: for 2 s' in page
    assert "and 3 more nodes" in page


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("8080", ("127.0.0.1", 8080)),
        ("0", ("127.0.0.1", 0)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:9", ("::1", 9)),
    ],
)
def test_a_page_is_at_the_loopback_address_unless_another_is_named(given: str, address: tuple[str, int]) -> None:
    assert page_address(given) == address


@pytest.mark.parametrize("given", ["", "x", "99999", "host:", "1:2:3"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(LocalError, match="--http"):
        page_address(given)
