"""The page of a job in a real browser: headless Chromium, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quicoll.cli.link_words import LinkRow
from quicoll.cli.status_page import PageServer, html_page
from quicoll.cli.status_words import NodeRow, Picture

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium"),
]

NAMES = ("worker-0", "worker-1", "<script>document.title='taken'</script>")


def picture() -> Picture:
    rows = [
        NodeRow(node=name, rank=str(rank), state="left out", step="84", rtt="16.8 ms", note="why " * 60, troubled=True)
        for rank, name in enumerate(NAMES)
    ]
    link = LinkRow(
        node=NAMES[0], peer=NAMES[2], sent="12.3 MB/s", received="900 B/s", rtt="16.8 ms", loss="3.1 %", resends="0",
        path_takes="25.0 MB/s", in_flight="65.5 kB", note="by lanes", troubled=True,
    )  # fmt: skip
    return Picture(job="train", condition="held", sentence="job train: held", rows=tuple(rows), links=(link,))


@pytest.mark.parametrize("width", [420, 1200])
def test_a_browser_draws_the_table_runs_nothing_and_needs_nothing_from_elsewhere(width: int, tmp_path: Path) -> None:
    asked: list[str] = []

    def page() -> str:
        asked.append("page")
        return html_page(picture(), every=3600.0)

    server = PageServer(("127.0.0.1", 0), page=page, all_links=page, facts=dict)
    try:
        ended = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={width},800", "--dump-dom", server.url,
            ],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        server.close()
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert asked
    seen = ended.stdout
    assert re.search(r"<title>[^<]*train</title>", seen), seen[:500]  # no script has changed it
    body = seen.partition("<body>")[2]
    assert "<script" not in body
    for name in NAMES[:2]:
        assert f">{name}</td>" in body
    assert ">! worker-0</td>" in body
    assert ">3.1 %</td>" in body
    assert body.count("left out") >= len(NAMES)
