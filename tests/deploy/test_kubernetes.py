"""The manifests of `deploy/kubernetes`: what would only fail in a cluster, and the probes on a server."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.files import DEPLOY, OPEN_PATHS, check_command, check_settings, check_variables, documents
from tests.server.kit import TOKEN, port_of

from banksman.config.keys import KEYS

FILES = documents("kubernetes", "kustomization.yaml")[0]["resources"]
OBJECTS = [document for name in FILES for document in documents("kubernetes", name)]
WORKLOADS = [each for each in OBJECTS if each["kind"] in ("StatefulSet", "Deployment")]
PROBES = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
(CONFIG,) = [each["data"] for each in OBJECTS if each["kind"] == "ConfigMap"]
POD_IP = "127.0.0.2"
by_name = pytest.mark.parametrize("workload", WORKLOADS, ids=[each["metadata"]["name"] for each in WORKLOADS])


def pod_of(workload: Any) -> Any:
    return workload["spec"]["template"]["spec"]


def container_of(workload: Any) -> Any:
    (container,) = pod_of(workload)["containers"]
    return container


def named(kind: str, name: str) -> Any:
    (found,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def test_manifests_are_one_object_each_and_hold_no_secret() -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in OBJECTS]
    assert len(set(names)) == len(names)
    assert "Secret" not in {kind for kind, _ in names}
    assert {each["kind"] for each in WORKLOADS} == {"StatefulSet", "Deployment"}
    for workload in WORKLOADS:
        for variable in container_of(workload)["env"]:
            key = next((key for key in KEYS.values() if key.variable == variable["name"]), None)
            is_secret = key is not None and (key.is_secret or key.name == "serve.store")
            assert ("secretKeyRef" in variable.get("valueFrom", ())) == is_secret, variable["name"]


@by_name
def test_manifest_starts_banksman_with_settings_that_exist(workload: Any, tmp_path: Path) -> None:
    container = container_of(workload)
    check_command(container["args"])
    check_variables(variable["name"] for variable in container["env"])
    (path,) = [each["value"] for each in container["env"] if each["name"] == "BANKSMAN_CONFIG"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod_of(workload)["volumes"]}
    assert (
        volumes[mounts[str(Path(path).parent)]]["configMap"]["name"]
        == named("ConfigMap", "banksman")["metadata"]["name"]
    )
    (tmp_path / "config.toml").write_text(CONFIG[Path(path).name], encoding="utf-8")
    settings = check_settings(tmp_path / "config.toml")
    assert settings["serve.bind"] == "0.0.0.0"
    # Each server with webhooks sends each event.
    assert "serve.webhooks" not in settings
    names = [variable["name"] for variable in container["env"]]
    assert "BANKSMAN_SERVE_WEBHOOKS" not in names
    # Kubernetes expands only what stands before.
    assert names.index("POD_IP") < names.index("BANKSMAN_SERVE_HOSTS")
    assert pod_of(workload)["terminationGracePeriodSeconds"] > settings["serve.drain_seconds"] + 20
    claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())}
    assert set(mounts.values()) <= volumes.keys() | claims
    # Where the server and the agents write.
    assert mounts.keys() >= {"/state", "/tmp"}


@by_name
def test_manifest_runs_without_privileges_as_the_user_of_the_image(workload: Any) -> None:
    own, whole = container_of(workload)["securityContext"], pod_of(workload)["securityContext"]
    assert own == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert whole["runAsNonRoot"] is True
    assert f"\nUSER {whole['runAsUser']}\n" in (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert pod_of(workload)["automountServiceAccountToken"] is False


@by_name
def test_manifest_selects_its_own_pods(workload: Any) -> None:
    spec, name = workload["spec"], workload["metadata"]["name"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    assert named("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"] == labels
    service = named("Service", name)["spec"]
    assert service["selector"] == labels
    (port,) = container_of(workload)["ports"]
    assert port == {"name": "http", "containerPort": KEYS["serve.port"].default}
    assert [each["targetPort"] for each in service["ports"]] == ["http"]


@by_name
def test_probes_name_open_routes(workload: Any) -> None:
    container = container_of(workload)
    found = {name: container[name]["httpGet"] for name in PROBES}
    assert {name: probe["path"] for name, probe in found.items()} == PROBES
    assert set(PROBES.values()) <= OPEN_PATHS
    assert {probe["port"] for probe in found.values()} == {"http"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """Start the front end by its manifest, with a store in memory, and yield its port."""
    (tmp_path / "config.toml").write_text(CONFIG["config.toml"], encoding="utf-8")
    given = {
        "BANKSMAN_CONFIG": str(tmp_path / "config.toml"),
        "BANKSMAN_SERVE_STORE": "memory:",
        "BANKSMAN_SERVE_TOKEN": TOKEN,
        "BANKSMAN_SERVE_PORT": "0",
    }
    container = container_of(named("Deployment", "banksman"))
    (hosts,) = [each["value"] for each in container["env"] if each["name"] == "BANKSMAN_SERVE_HOSTS"]
    given |= {"POD_IP": POD_IP, "BANKSMAN_SERVE_HOSTS": hosts.replace("$(POD_IP)", POD_IP)}
    assert {each["name"] for each in container["env"]} == given.keys() - {"BANKSMAN_SERVE_PORT"}
    process = subprocess.Popen(
        [sys.executable, "-m", "banksman", *container["args"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **given, "XDG_STATE_HOME": str(tmp_path / "state")},
    )
    assert process.stdout is not None
    try:
        yield port_of(process.stdout.readline())
    finally:
        process.terminate()
        process.stdout.close()
        assert process.wait(60) == 0


def status(port: int, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(POD_IP, port, timeout=60)
    with closing(connection):
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status


def test_probes_pass_on_a_server_of_the_manifest(server: int) -> None:
    probes = [container_of(workload)[name]["httpGet"] for workload in WORKLOADS for name in PROBES]
    for probe in probes:
        headers = {header["name"]: header["value"] for header in probe["httpHeaders"]}
        assert status(server, probe["path"], headers) == 200


def test_server_of_the_manifest_is_reached_by_its_names_and_its_address(server: int) -> None:
    token = {"Authorization": f"Bearer {TOKEN}"}
    for name in ("banksman", "banksman.example.com"):
        assert status(server, "/v1/server", {"Host": name, **token}) == 200
    # Prometheus sends the address of the pod.
    assert status(server, "/metrics", token) == 200
    assert status(server, "/metrics", {"Host": "127.0.0.3", **token}) == 403
