"""Gate report: every test marked `gate(id)` is counted; the summary goes to the terminal and to build/gates.json, with
the seconds that their tests took, set-up included. Tests that were skipped with a reason that begins with NOT RUN are
counted there, too.

And `one_thread`, for tests whose results or times depend on torch's threads, the settings of hypothesis, and garbage
collection.
"""

from __future__ import annotations

import gc
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# As the console script does, before torch is imported: two test processes whose threads spin while they wait starve
# each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# With a second thread in each, the processes of the tests wait for each other more than they gain.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU Triton's kernels run in its interpreter. It must be chosen before any package imports Triton.
if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# An example on a busy machine takes as long as it takes: no time limit of hypothesis fails a test. `make gates-full`
# draws ten times as many examples.
settings.register_profile(
    "suite",
    parent=settings.default,
    max_examples=300 if os.environ.get("MOEC_FULL_GATES") == "1" else 30,
    deadline=None,
    suppress_health_check=[
        *settings.default.suppress_health_check,
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
    ],
)
settings.load_profile("suite")

_results: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
_seconds: dict[str, float] = defaultdict(float)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Gates travel as properties of the report, so that they also arrive from other processes."""
    item.user_properties += [("gate", marker.args[0]) for marker in item.iter_markers("gate")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests, so that no process ends with one while the other has nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Take what is loaded by now out of garbage collection. With torch and all tests a collection takes half a second.

    `moec tune` collects before each of its engines.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Leave the numpy kernels after a test whose command chose them: their bits differ from all others."""
    from moec.runtime.kernels import extension

    state = extension.state
    before = state.uses_numpy
    yield
    state.uses_numpy = before


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for gate in (value for name, value in report.user_properties if name == "gate"):
        _seconds[str(gate)] += report.duration
        if report.when == "call" or report.outcome != "passed":
            _results[str(gate)][report.outcome] += 1


def state(counts: dict[str, int]) -> str:
    """FAILED, ok, or NOT RUN where all tests of a gate were skipped."""
    return "FAILED" if counts.get("failed") else ("ok" if counts.get("passed") else "NOT RUN")


def not_run(skipped: list[pytest.TestReport]) -> dict[str, int]:
    """Return the number of tests that were skipped because this machine lacks something, by reason."""
    reasons = [report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)]
    return Counter(reason[reason.index("NOT RUN") :] for reason in reasons if "NOT RUN" in reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in not_run(terminalreporter.stats.get("skipped", [])).items():
        terminalreporter.write_line(f"{reason}: {count} tests")
    if not _results:
        return
    gates = {gate: dict(_results[gate]) for gate in sorted(_results, key=lambda name: int(name[1:]))}
    terminalreporter.section("gates")
    for gate, counts in gates.items():
        terminalreporter.write_line(f"{gate:>4} {state(counts)}: {counts}, {_seconds[gate]:.0f} s")
    target = config.rootpath / "build" / "gates.json"
    target.parent.mkdir(exist_ok=True)
    told = {
        gate: {"state": state(counts), **counts, "seconds": round(_seconds[gate], 1)} for gate, counts in gates.items()
    }
    target.write_text(json.dumps(told) + "\n")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of torch for a module, the former count after it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
