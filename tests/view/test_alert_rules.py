"""The shipped alert rules: they fire when they should and not otherwise, and say what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
from tests.monitor.jobs import run_info

from ringside.monitor import KINDS
from ringside.monitor.alerts.counters import MetricCounters
from ringside.view.export.prometheus import RunMetrics

RULES = Path(str(resources.files("ringside.view") / "alerts" / "ringside.rules.yml"))
CASES = Path(__file__).parent / "ringside.rules.test.yml"
RUNBOOK = Path(__file__).parents[2] / "docs" / "alerts.md"
VERDICTS = RUNBOOK.with_name("verdicts.md")
LIMIT_S = 60.0

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here (Debian package prometheus)"
)


def promtool(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, timeout=LIMIT_S)


def cases_for(folder: Path, rules: str) -> Path:
    """Write the cases beside other rules, in another folder."""
    (folder / "ringside.rules.yml").write_text(rules)
    path = folder / CASES.name
    path.write_text(re.sub(r"rule_files:.*", "rule_files: [ringside.rules.yml]", CASES.read_text()))
    return path


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should_and_not_otherwise(tmp_path: Path) -> None:
    done = promtool("test", "rules", cases_for(tmp_path, RULES.read_text()))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("was", "becomes"),
    [('{kind="hang"} == 1', '{kind="hang"} == 0'), ("> 300", "> 600"), ("> 0.1\n", "> 0.9\n"), ("> 0.05\n", "> 0.6\n")],
)
def test_the_cases_notice_a_wrong_rule(tmp_path: Path, was: str, becomes: str) -> None:
    rules = RULES.read_text()
    assert was in rules
    assert promtool("test", "rules", cases_for(tmp_path, rules.replace(was, becomes))).returncode != 0


def test_the_rules_ask_for_metrics_that_there_are() -> None:
    asked = set(
        re.findall(
            r"ringside_\w+", " ".join(re.findall(r"expr: (?:>-\n)?((?:.|\n)*?)\n +(?:for|labels):", RULES.read_text()))
        )
    )
    families = list(RunMetrics(MetricCounters(run_info(2)).snapshot([], {}, {})).collect())
    served = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert len(asked) >= 10
    assert asked <= served


def test_every_kind_of_verdict_has_a_rule_and_every_alert_and_metric_a_place_in_the_docs() -> None:
    rules, page = RULES.read_text(), RUNBOOK.read_text()
    assert {kind for kind in KINDS if f'kind="{kind}"' in rules} == set(KINDS)
    names = re.findall(r"alert: (\w+)", rules)
    assert len(names) == len(set(names)) == rules.count("runbook: ") == rules.count("severity: ")
    assert [name for name in names if name not in page] == []
    for document in (RUNBOOK, VERDICTS):
        # These two stand without a verdict of their own.
        anchors = set(re.findall(r'<a id="(\w+)">', document.read_text())) - {"assessment", "cost"}
        assert set(re.findall(rf"docs/{document.name}#(\w+)", rules)) == anchors
    assert set(re.findall(r"docs/verdicts\.md#(\w+)", rules)) == set(KINDS)
    families = RunMetrics(MetricCounters(run_info(2)).snapshot([], {}, {})).collect()
    assert [family.name for family in families if family.name not in page] == []
