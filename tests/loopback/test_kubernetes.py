"""The manifest for Kubernetes: its parts fit together, and its containers' commands work with the files and variables
that it gives them. A cluster is not here: paths are mapped below a directory, and names to this host.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quicoll_transport.security.authority import create_authority, issue

ROOT = Path(__file__).parents[2]
ITEMS = {item["kind"]: item for item in json.loads((ROOT / "examples/kubernetes/job.json").read_text())["items"]}
SCRIPT = """
import asyncio, os
import numpy as np
import quicoll

async def main():
    async with quicoll.join(join_timeout=300.0) as job:
        async with job.step():
            total = await job.group.all_reduce(np.ones(10))
        print(job.node, int(total[0]), flush=True)

asyncio.run(main())
"""


def pod(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = ITEMS[kind]["spec"]["template"]
    return found


def container(kind: str) -> dict[str, Any]:
    (found,) = pod(kind)["spec"]["containers"]
    return dict(found)


def variables(kind: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(kind)["env"]}


def test_the_parts_fit_together() -> None:
    service, coordinator, job = ITEMS["Service"], ITEMS["StatefulSet"]["spec"], ITEMS["Job"]["spec"]
    selector = service["spec"]["selector"]
    assert selector.items() <= pod("StatefulSet")["metadata"]["labels"].items()
    assert not selector.items() <= pod("Job")["metadata"]["labels"].items()
    assert coordinator["selector"]["matchLabels"].items() <= pod("StatefulSet")["metadata"]["labels"].items()
    assert (coordinator["serviceName"], coordinator["replicas"]) == (service["metadata"]["name"], 1)
    (port,) = service["spec"]["ports"]
    (opened,) = container("StatefulSet")["ports"]
    assert (port["protocol"], port["port"]) == (opened["protocol"], opened["containerPort"]) == ("UDP", 4433)
    assert f"--listen 0.0.0.0:{port['port']}" in container("StatefulSet")["command"][-1]
    assert variables("Job")["QUICOLL_COORDINATOR"] == f"{service['metadata']['name']}:{port['port']}"
    assert variables("Job")["QUICOLL_JOB"] == variables("StatefulSet")["QUICOLL_JOB"]
    assert job["completionMode"] == "Indexed"
    world = variables("Job")["QUICOLL_WORLD_SIZE"]
    assert str(job["completions"]) == str(job["parallelism"]) == world
    assert f"--world-size {world} " in container("StatefulSet")["command"][-1]


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_every_mount_is_a_volume_and_keys_are_not_written_to_a_disk(kind: str) -> None:
    claims = [each["metadata"]["name"] for each in ITEMS[kind]["spec"].get("volumeClaimTemplates", ())]
    volumes = {each["name"]: each for each in pod(kind)["spec"]["volumes"]}
    mounts = container(kind)["volumeMounts"]
    assert {each["name"] for each in mounts} == {*volumes, *claims}
    assert volumes["certs"]["emptyDir"]["medium"] == "Memory"
    assert oct(volumes["secret"]["secret"]["defaultMode"]) == "0o440"  # JSON has no octal numbers
    where = variables(kind)["QUICOLL_CERTS"]
    assert any(where.startswith(each["mountPath"]) for each in mounts if each["name"] == "certs")


def shell(kind: str, place: Path, names: Mapping[str, str], **more: str) -> subprocess.Popen[str]:
    """Run a container's command with its variables. Paths of mounts are below `place`, and `names` stand for others."""
    paths = {each["mountPath"]: str(place / each["name"]) for each in container(kind)["volumeMounts"]}

    def mapped(text: str) -> str:
        for name, here in {**paths, **names}.items():
            text = text.replace(name, here)
        return text

    kept = {name: value for name, value in os.environ.items() if not re.match(r"QUICOLL_|SLURM_|RANK|WORLD_SIZE", name)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "transport"), os.environ.get("PYTHONPATH", "")])
    given = {name: mapped(value) for name, value in variables(kind).items()}
    return subprocess.Popen(
        [mapped(word) for word in container(kind)["command"]],
        env={**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **given, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_its_commands_make_a_job(tmp_path: Path) -> None:
    made = tmp_path / "made"
    create_authority(made, job=variables("Job")["QUICOLL_JOB"])
    issue(made, role="coordinator", node="coordinator")
    for index in range(2):
        issue(made, role="worker", node=f"worker-{index}")
    places = [tmp_path / name for name in ("home", "worker-0", "worker-1")]
    for place, pattern in zip(places, ("coordinator-*", "worker-*", "worker-*"), strict=True):
        for name in ("secret", "certs", "journal"):
            (place / name).mkdir(parents=True)
        for file in (made / "ca.pem", *made.glob(pattern)):
            (place / "secret" / file.name).write_bytes(file.read_bytes())
            (place / "secret" / file.name).chmod(0o440)  # as of a secret with fsGroup
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "train.py").write_text(SCRIPT)
    names = {
        "train-coordinator:4433": f"127.0.0.1:{port}",
        "0.0.0.0:4433": f"127.0.0.1:{port}",
        "exec quicoll ": f"exec {sys.executable} -m quicoll.cli.main ",
        "exec python ": f"exec {sys.executable} ",
        "/app/train.py": str(tmp_path / "train.py"),
    }
    home = shell("StatefulSet", places[0], names)
    try:
        workers = [
            shell("Job", place, names, JOB_COMPLETION_INDEX=str(index)) for index, place in enumerate(places[1:])
        ]
        said = [worker.communicate(timeout=400) for worker in workers]
        assert [out for out, _ in said] == ["worker-0 2\n", "worker-1 2\n"], said
        assert (places[0] / "journal" / "journal.sqlite").exists()
        own = sorted(path.name for path in (places[1] / "certs" / "certs").iterdir())
        assert own == ["ca.pem", "worker-worker-0.key", "worker-worker-0.pem"]
    finally:
        home.terminate()
        home.communicate(timeout=60)
