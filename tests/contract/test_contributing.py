"""The parts that CONTRIBUTING.md prints: one file and one line, and they work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from outrider import Engine
from outrider.audit.exact import audit_exact
from outrider.core.processors import Sampling
from outrider.models.toy import ToyModel
from outrider.registry import DRAFTERS, POLICIES, RULES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FILES = dict(re.findall(r"```python\n# src/(outrider/\S+\.py)\n(.*?)```", TEXT, re.DOTALL))
LINES = re.findall(r'In `(\w+)`: `"(\w+)": "(\S+?):(\w+)",`', TEXT)
TABLES = {"DRAFTERS": DRAFTERS, "RULES": RULES, "POLICIES": POLICIES}
PROMPT = (0, 1, 0, 1, 0)


@pytest.fixture
def parts(monkeypatch):
    """Each file imported under its own name, and each line in its table."""
    for path, body in FILES.items():
        module = ModuleType(path.removesuffix(".py").replace("/", "."))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(body, path, "exec"), module.__dict__)
    for table, name, module, attribute in LINES:
        monkeypatch.setitem(TABLES[table]._entries(), name, f"{module}:{attribute}")


def test_each_kind_is_shown_once():
    assert [table for table, *_ in LINES] == list(TABLES)
    assert {module.replace(".", "/") + ".py" for _, _, module, _ in LINES} == set(FILES)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("rule", ["match", "rejection", "coupled", "block"])
@pytest.mark.parametrize("drafter", ["frequency", "model:toy:vocab=3,seed=9", "ngram"])
@pytest.mark.parametrize("length", [2, "eager", "eager:2"])
def test_the_law_is_the_targets(rule, drafter, length):
    engine = Engine(ToyModel.random(3, seed=1), drafter=drafter, rule=rule, draft_length=length)
    report = audit_exact(engine, [PROMPT], max_tokens=3, sampling=Sampling(temperature=1.0))
    assert report.verdict == "consistent"


@pytest.mark.usefixtures("parts")
def test_the_rule_judges_trees():
    engine = Engine(
        ToyModel.random(3, seed=1), drafter="model:toy:vocab=3,seed=9#tree=2,2", rule="match"
    )
    report = audit_exact(engine, [PROMPT], max_tokens=3, sampling=Sampling(temperature=1.0))
    assert report.verdict == "consistent"


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("length", [1, 4, "eager"])
def test_greedy_output_is_plain(length):
    engine = Engine(ToyModel.random(5, seed=3), drafter="frequency", draft_length=length)
    made = engine.generate(PROMPT, max_tokens=40)
    assert made.token_ids == engine.generate(PROMPT, max_tokens=40, plain=True).token_ids
    assert made.trace.summary()["accepted_tokens"] > 0


def test_the_contract_tests_cover_and_pass_them(tmp_path):
    """As parts of another package, through its entry points; no test is edited."""
    entries = []
    for table, name, module, attribute in LINES:
        own = f"{name}_for_outrider"
        (tmp_path / f"{own}.py").write_text(FILES[module.replace(".", "/") + ".py"])
        entries.append(f"[outrider.{table.lower()}]\n{name} = {own}:{attribute}\n")
    about = tmp_path / "parts_for_outrider-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: parts-for-outrider\nVersion: 1\n")
    (about / "entry_points.txt").write_text("\n".join(entries))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "frequency or match",
         "tests/contract/test_drafters.py", "tests/contract/test_rules.py"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d\d passed", done.stdout), done.stdout[-3000:]
