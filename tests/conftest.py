"""Gate report: every test marked `gate(id)` is counted, and the summary names gates that did not run."""

from __future__ import annotations

from collections import defaultdict

import pytest

_results: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        for marker in item.iter_markers("gate"):
            _results[marker.args[0]][report.outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _results:
        return
    terminalreporter.section("gates")
    for gate in sorted(_results, key=lambda name: int(name[1:])):
        counts = _results[gate]
        state = "FAILED" if counts["failed"] else ("ok" if counts["passed"] else "NOT RUN")
        terminalreporter.write_line(f"{gate:>4} {state}: {dict(counts)}")
