"""The comparison of strategies on an accelerator measures each with its own rule and its own counts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from bench.accelerator.measured import ARMS, DENSE_HERE, run, table, tokens_of
from moec.runtime import load

SHIPPED = Path(__file__).parents[2] / "examples" / "bundle"


def test_each_strategy_has_its_own_rule_and_counts(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Anna has 3 apples and buys 4. ", encoding="utf-8")
    options = Namespace(prompts=[4], beams=[2], tokens=2, rounds=1)
    asked = {"accelerator": "torch-cpu", "accelerator_memory": "18MiB", "accelerator_dense": "device"}
    with load(SHIPPED, expert_cache="100%", context=40, slots=2, threads=1, **asked) as engine:
        rows = run(engine, tokens_of(engine, text, 40), options)
        assert engine.accelerator is engine.model.accelerator is not None
        on_device = len(engine.accelerator.placement.resident)
    experts = {row["strategy"]: row["experts"] for row in rows}
    assert list(experts) == list(ARMS)
    assert 0 < on_device < 48
    assert experts["CPU only"] == {"resident": 0, "copied": 0, "cpu": 0, "copied_bytes": 0}
    for name, idle in (("copy only", "cpu"), ("static placement", "copied")):
        assert experts[name][idle] == 0
        assert all(experts[name][place] for place in {"resident", "copied", "cpu"} - {idle})
    assert sum(experts[DENSE_HERE][place] for place in ("resident", "copied", "cpu")) > 0
    assert len(table(rows).splitlines()) == 2 + len(ARMS)
