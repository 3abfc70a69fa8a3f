"""The Grafana dashboard and the alert rules of `deploy/` query metrics that the server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from banksman import Host, Kind
from banksman.runtime.host_stats import OTHER_PHASES, PHASES
from banksman.server.ops import metrics
from banksman.server.ops.readiness import Unready
from banksman.server.streams.follower import StreamCounts

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "banksman.json").read_text(encoding="utf-8"))
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"


def panels() -> Mapping[str, list[str]]:
    """Return the queries of each panel by its title."""
    found = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    return {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in found}


def queries() -> Mapping[str, str]:
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"][0]["rules"]
    found = {rule["alert"]: rule["expr"] for rule in rules}
    assert len(found) == len(rules), "two alerts have one name"
    for title, each in panels().items():
        found |= {f"{title} {number}": expression for number, expression in enumerate(each)}
    found["instance"] = DASHBOARD["templating"]["list"][1]["query"]
    return found


async def scraped() -> set[str]:
    """Return the names of all series that a server can have."""
    async with Host("memory:") as host:
        host.sessions()
        text = metrics.render(host, StreamCounts()).decode()
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


async def test_dashboard_and_alerts_name_metrics_that_exist() -> None:
    known = await scraped()
    for place, query in queries().items():
        named = set(re.findall(r"\b(?:banksman|process)_\w+", query))
        assert named or "up{" in query, place
        assert named <= known, place


def test_alerts_report_webhooks_that_are_late_or_lost() -> None:
    found = {name: query for name, query in queries().items() if name.startswith("BanksmanWebhooks")}
    assert {re.findall(r"banksman_\w+", query)[0] for query in found.values()} == {
        "banksman_webhook_lag_seconds",
        "banksman_webhook_gaps_total",
    }


def test_dashboard_and_alerts_name_labels_that_exist() -> None:
    for place, query in queries().items():
        for phases in re.findall(r'phase=~?"([^"]+)"', query):
            assert set(phases.split("|")) <= {*PHASES, *OTHER_PHASES}, place
        for outcomes in re.findall(r'outcome=~?"([^"]+)"', query):
            assert set(outcomes.split("|")) <= {kind.value for kind in Kind}, place


def test_dashboard_panels_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["w"]) for y in range(place["h"])}
        cells = {(x + place["x"], y + place["y"]) for x, y in cells}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: make promtool")
def test_dashboard_and_alerts_pass_promtool(tmp_path: Path) -> None:
    # promtool checks no dashboard, so its queries become rules.
    rules: list[dict[str, Any]] = []
    for title, each in panels().items():
        for query in each:
            # What Grafana replaces.
            expression = query.replace("$__rate_interval", "5m").replace("$instance", ".*")
            rules.append({"record": f"panel{len(rules)}", "expr": expression, "labels": {"title": title}})
    written = tmp_path / "panels.json"
    written.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    for file in (ALERTS, written):
        done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: make promtool")
def test_alerts_of_an_unready_server_fire_in_time(tmp_path: Path) -> None:
    def series(reason: str, values: str) -> dict[str, str]:
        return {"series": f'banksman_unready{{instance="a",reason="{reason}"}}', "values": values}

    def case(alert: str, at: str, **labels: str) -> dict[str, Any]:
        found = [{"exp_labels": {"instance": "a", **labels}}] if labels else []
        return {"alertname": alert, "eval_time": at, "exp_alerts": found}

    unready = {"severity": "critical", "reason": "disk_nearly_full"}
    tests = [
        {
            "interval": "1m",
            "input_series": [series("disk_nearly_full", "0 1x9 0x9"), series("draining", "1x70")],
            "alert_rule_test": [
                case("BanksmanUnready", "2m"),
                case("BanksmanUnready", "4m", **unready),
                case("BanksmanUnready", "11m"),
                case("BanksmanDrainsLong", "59m"),
                case("BanksmanDrainsLong", "61m", severity="warning"),
            ],
        }
    ]
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    for rule in rules["groups"][0]["rules"]:
        # promtool compares the words, too. Here the labels and the times matter.
        del rule["annotations"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    told = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(told), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_name_reasons_that_exist() -> None:
    known = {reason.name.lower() for reason in Unready}
    for place, query in queries().items():
        for named in re.findall(r'reason!?=~?"([^"]+)"', query):
            assert set(named.split("|")) <= known, place
