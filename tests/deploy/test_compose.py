"""The image and the services of `deploy/docker`: their commands, and a whole run without containers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.deploy import containers
from tests.deploy.files import DEPLOY, check_command, check_variables, documents
from tests.thorough import thorough

from banksman.config.keys import KEYS

DOCKER = DEPLOY / "docker"
SERVICES: dict[str, Any] = documents("docker", "compose.yaml")[0]["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "banksman"}


def test_image_runs_the_server_as_a_user_in_list_form() -> None:
    text = re.sub(r"\\\n\s*", "", (DOCKER / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    found = {name: words for name, _, words in lines}
    assert found["USER"].isdecimal()
    assert found["USER"] != "0"
    assert f"--uid {found['USER']} " in found["RUN"]
    # The last folder of the image that must belong to the user, and the volume.
    assert f" {found['VOLUME']} {found['WORKDIR']}" in found["RUN"]
    assert found["ENV"] == f"XDG_STATE_HOME={found['VOLUME']}"
    assert json.loads(found["ENTRYPOINT"]) == ["banksman"]
    assert check_command(json.loads(found["CMD"]))["allow_remote"]
    assert found["EXPOSE"] == str(KEYS["serve.port"].default)


@pytest.mark.parametrize("name", OURS)
def test_service_has_a_command_and_variables_that_exist(name: str) -> None:
    service = OURS[name]
    check_command(service["command"])
    check_variables(service["environment"])
    assert int(service["stop_grace_period"].removesuffix("s")) > KEYS["serve.drain_seconds"].default
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert any(volume.endswith(":/state") for volume in service["volumes"])


def test_compose_file_has_three_nodes_no_secret_and_a_local_port() -> None:
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"\$\{(\w+)", text)) == {"NATS_PASSWORD"}
    assert "banksman:${NATS_PASSWORD:?" in text
    nodes = sorted(SERVICES.keys() - OURS.keys())
    assert [f"nats://{name}:6222" for name in nodes] == re.findall(
        r'"(nats://[^"]+)"', (DOCKER / "nats.conf").read_text(encoding="utf-8")
    )
    assert [SERVICES[name]["environment"]["NATS_NAME"] for name in nodes] == nodes
    assert len(nodes) == 3
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published == ["127.0.0.1:4380:4380"]


@thorough
def test_services_run_as_pid_1_and_survive_the_loss_of_a_node(tmp_path: Path) -> None:
    flags = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    flags += [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    probe = subprocess.run(["unshare", *flags, "true"], capture_output=True, text=True, timeout=60, check=False)
    if probe.returncode != 0:
        pytest.skip(f"NOT TESTED: no namespaces here: {probe.stderr}")
    argv = [sys.executable, containers.__file__, str(DOCKER), str(tmp_path)]
    done = subprocess.run(["unshare", *flags, *argv], capture_output=True, text=True, check=False)
    logs = "\n".join(f"{log.name}: {log.read_text(encoding='utf-8')[-2000:]}" for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    assert json.loads(done.stdout) == {
        "hosts": ["front", "host-1", "host-2"],
        "outcomes": ["done", "done"],
        "codes": {"front": 0, "host-1": 0, "host-2": 0},
        "health": 0,
    }
