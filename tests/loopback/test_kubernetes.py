"""The manifests for Kubernetes: their parts fit together, and their containers' commands work with the files and
variables that they give them. A cluster is not here: paths are mapped below a directory, and names to this host.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ports import named_port

from quicoll_transport.security.authority import create_authority, issue

ROOT = Path(__file__).parents[2]
FILES = ("job.json", "jobset.json")
ROLES = ("coordinator", "worker")
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


def items(file: str) -> dict[str, Any]:
    """Return what a manifest makes, by its kind."""
    return {item["kind"]: item for item in json.loads((ROOT / "examples" / "kubernetes" / file).read_text())["items"]}


def controller(file: str, role: str) -> dict[str, Any]:
    """Return the specification of what makes the pods of a role: a StatefulSet's or a Job's."""
    made = items(file)
    if file == "job.json":
        return dict(made["StatefulSet" if role == "coordinator" else "Job"]["spec"])
    jobs = {each["name"]: each for each in made["JobSet"]["spec"]["replicatedJobs"]}
    return dict(jobs[role]["template"]["spec"])


def pod(file: str, role: str) -> dict[str, Any]:
    return dict(controller(file, role)["template"])


def container(file: str, role: str) -> dict[str, Any]:
    (found,) = pod(file, role)["spec"]["containers"]
    return dict(found)


def variables(file: str, role: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(file, role)["env"]}


def test_the_job_reaches_the_coordinator_by_its_service() -> None:
    service, coordinator = items("job.json")["Service"], controller("job.json", "coordinator")
    selector = service["spec"]["selector"]
    labels = pod("job.json", "coordinator")["metadata"]["labels"]
    assert selector.items() <= labels.items()
    assert not selector.items() <= pod("job.json", "worker")["metadata"]["labels"].items()
    assert coordinator["selector"]["matchLabels"].items() <= labels.items()
    assert (coordinator["serviceName"], coordinator["replicas"]) == (service["metadata"]["name"], 1)
    assert service["spec"]["clusterIP"] == "None"
    (port,) = service["spec"]["ports"]
    assert (port["protocol"], port["port"], port["targetPort"]) == ("UDP", 4433, 4433)
    assert variables("job.json", "worker")["QUICOLL_COORDINATOR"] == f"{service['metadata']['name']}:{port['port']}"
    # A journal that outlives the job would tell the next one that it is over.
    assert coordinator["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete"}


def test_the_jobset_reaches_the_coordinator_by_its_pods_name() -> None:
    """`<jobset>-<replicated job>-<job's index>-<pod's index>.<subdomain>`: the API's `network.enableDNSHostnames`."""
    jobset, claim = items("jobset.json")["JobSet"], items("jobset.json")["PersistentVolumeClaim"]
    network, jobs = jobset["spec"]["network"], jobset["spec"]["replicatedJobs"]
    assert network["enableDNSHostnames"] is True
    host = f"{jobset['metadata']['name']}-{jobs[0]['name']}-0-0.{network['subdomain']}"
    assert variables("jobset.json", "worker")["QUICOLL_COORDINATOR"] == f"{host}:4433"
    assert [each["replicas"] for each in jobs] == [1, 1]  # a second job's pods would have the first one's indexes
    assert jobs[1]["dependsOn"] == [{"name": jobs[0]["name"], "status": "Ready"}]
    assert jobset["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [jobs[1]["name"]]}
    assert controller("jobset.json", "coordinator")["completions"] == 1
    (journal,) = (each for each in pod("jobset.json", "coordinator")["spec"]["volumes"] if each["name"] == "journal")
    assert journal["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize("file", FILES)
def test_all_numbers_of_ranks_are_one_and_a_lost_pod_is_made_again_with_its_index(file: str) -> None:
    job, world = controller(file, "worker"), variables(file, "worker")["QUICOLL_WORLD_SIZE"]
    assert (job["completionMode"], str(job["completions"]), str(job["parallelism"])) == ("Indexed", world, world)
    assert job["backoffLimitPerIndex"] > 0
    assert pod(file, "worker")["spec"]["restartPolicy"] == "Never"  # which backoffLimitPerIndex asks for
    command = container(file, "coordinator")["command"][-1]
    assert f"--world-size {world} " in command
    (opened,) = container(file, "coordinator")["ports"]
    assert (opened["protocol"], opened["containerPort"]) == ("UDP", 4433)
    assert f"--listen 0.0.0.0:{opened['containerPort']}" in command
    assert variables(file, "worker")["QUICOLL_JOB"] == variables(file, "coordinator")["QUICOLL_JOB"]


@pytest.mark.parametrize("role", ROLES)
def test_both_manifests_have_the_same_containers(role: str) -> None:
    job, jobset = (container(file, role) for file in FILES)
    for each in (job, jobset):
        each["env"] = [variable for variable in each["env"] if variable["name"] != "QUICOLL_COORDINATOR"]
    assert job == jobset


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("role", ROLES)
def test_every_mount_is_a_volume_and_keys_are_not_written_to_a_disk(file: str, role: str) -> None:
    claims = [each["metadata"]["name"] for each in controller(file, role).get("volumeClaimTemplates", ())]
    volumes = {each["name"]: each for each in pod(file, role)["spec"]["volumes"]}
    mounts = container(file, role)["volumeMounts"]
    assert {each["name"] for each in mounts} == {*volumes, *claims}
    assert volumes["certs"]["emptyDir"]["medium"] == "Memory"
    assert oct(volumes["secret"]["secret"]["defaultMode"]) == "0o440"  # JSON has no octal numbers
    where = variables(file, role)["QUICOLL_CERTS"]
    assert any(where.startswith(each["mountPath"]) for each in mounts if each["name"] == "certs")


def shell(file: str, role: str, place: Path, names: Mapping[str, str], **more: str) -> subprocess.Popen[str]:
    """Run a container's command with its variables. Paths of mounts are below `place`, and `names` stand for others."""
    paths = {each["mountPath"]: str(place / each["name"]) for each in container(file, role)["volumeMounts"]}

    def mapped(text: str) -> str:
        for name, here in {**paths, **names}.items():
            text = text.replace(name, here)
        return text

    kept = {name: value for name, value in os.environ.items() if not re.match(r"QUICOLL_|SLURM_|RANK|WORLD_SIZE", name)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "transport"), os.environ.get("PYTHONPATH", "")])
    given = {name: mapped(value) for name, value in variables(file, role).items()}
    return subprocess.Popen(
        [mapped(word) for word in container(file, role)["command"]],
        env={**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **given, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_its_commands_make_a_job(file: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    create_authority(made, job=variables(file, "worker")["QUICOLL_JOB"])
    issue(made, role="coordinator", node="coordinator")
    for index in range(2):
        issue(made, role="worker", node=f"worker-{index}")
    places = [tmp_path / name for name in ("home", "worker-0", "worker-1")]
    for place, pattern in zip(places, ("coordinator-*", "worker-*", "worker-*"), strict=True):
        for name in ("secret", "certs", "journal"):
            (place / name).mkdir(parents=True)
        for source in (made / "ca.pem", *made.glob(pattern)):
            (place / "secret" / source.name).write_bytes(source.read_bytes())
            (place / "secret" / source.name).chmod(0o440)  # as of a secret with fsGroup
    port = named_port()
    (tmp_path / "train.py").write_text(SCRIPT)
    names = {
        variables(file, "worker")["QUICOLL_COORDINATOR"]: f"127.0.0.1:{port}",
        "0.0.0.0:4433": f"127.0.0.1:{port}",
        "exec quicoll ": f"exec {sys.executable} -m quicoll.cli.main ",
        "exec python ": f"exec {sys.executable} ",
        "/app/train.py": str(tmp_path / "train.py"),
    }
    home = shell(file, "coordinator", places[0], names)
    try:
        workers = [
            shell(file, "worker", place, names, JOB_COMPLETION_INDEX=str(index))
            for index, place in enumerate(places[1:])
        ]
        said = [worker.communicate(timeout=400) for worker in workers]
        assert [out for out, _ in said] == ["worker-0 2\n", "worker-1 2\n"], said
        assert (places[0] / "journal" / "journal.sqlite").exists()
        own = sorted(path.name for path in (places[1] / "certs" / "certs").iterdir())
        assert own == ["ca.pem", "worker-worker-0.key", "worker-worker-0.pem"]
    finally:
        home.terminate()
        home.communicate(timeout=60)
