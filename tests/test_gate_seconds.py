"""The table of seconds of each gate."""

from __future__ import annotations

from tests.gate_seconds import table


def test_reports_add_up_and_gates_stand_by_number() -> None:
    fast = {"G10": {"state": "ok", "passed": 3, "seconds": 1.5}, "G2": {"state": "ok", "passed": 1, "seconds": 20.0}}
    slow = {"G10": {"state": "FAILED", "passed": 1, "failed": 2, "seconds": 3.0}}
    assert table([fast, slow]).splitlines()[2:] == [
        "| G2 | 1 | 20 |",
        "| G10 | 4, 2 failed | 4 |",
        "| all | 5, 2 failed | 24 |",
    ]
