"""A local cluster of two nodes that the test starts: equal bytes, a killed worker, refusals."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.checkpoint.url import CACHE
from moec.compiler.cluster import ray_pool
from moec.compiler.cluster.ray_pool import NodeReport
from moec.compiler.cluster.remote import experts_priced_by
from moec.compiler.cluster.session import ClusterSession
from moec.compiler.cluster.site import Site
from moec.compiler.request.options import Talk
from moec.manifests.errors import (
    CheckpointError,
    ContextOverflow,
    DoesNotFit,
    ExecutionError,
    MissingDependency,
    OptionError,
)
from tests.tiny_compile import (
    check_bundle,
    compile_tiny,
    contents,
    little_memory,
    names,
    save_model,
    save_problems,
    save_texts,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Ray closes sockets and files only at the end of its processes, and warns about its coming changes.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OPTIONS: dict[str, Any] = {"kind": "kl", "value": 0.02, "comparisons": True, "limit": 8}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home folder for this process and the nodes, which inherit it. Checkpoints of URLs are stored there."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[Any]:
    """Two nodes of one CPU each."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'moec[cluster]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setattr(ray_pool, "START_SECONDS", 3600)  # a worker imports torch, which a busy machine delays
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            cluster.add_node(num_cpus=1)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def address(cluster: Any) -> str:
    found: str = cluster.address
    return found


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Items whose answers are generated and scored."""
    return save_problems(tmp_path_factory.mktemp("data") / "problems", train=8, validation=8, test=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny", layers=2, experts=3)


@pytest.fixture(scope="module")
def alone(checkpoint: Path, problems: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of the bundle that one machine compiles."""
    output = tmp_path_factory.mktemp("alone") / "tiny-moec"
    compile_tiny(checkpoint, output, data=str(problems), **OPTIONS)
    return contents(output)


def worker_processes() -> set[int]:
    """Return the worker processes on this machine that the cluster of this test started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::Worker"):
                found.add(int(path.parent.name))
        except OSError:
            continue  # the process has ended
    return found


class Listener:
    """Records the messages of a compile, and calls a function when the first part of one of some stages is done."""

    def __init__(self, stages: Collection[str], action: Callable[[], None]) -> None:
        self.notes: list[str] = []
        self.bars: dict[str, tuple[int, int]] = {}
        self.processes: set[int] = set()
        self._stages, self._action = stages, action

    def talk(self) -> Talk:
        return Talk(self.notes.append, self._bar)

    def _bar(self, title: str) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            is_first = done > 0 and self.bars.get(title, (0, 0))[0] == 0
            self.bars[title] = done, total
            self.processes |= worker_processes()
            if is_first and title in self._stages:
                self._action()

        return report


def test_a_worker_that_dies_is_retried_and_the_bytes_are_those_of_one_machine(
    address: str, checkpoint: Path, home: Path, problems: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    """Workers read the checkpoint at a URL. One machine reads it in a folder."""
    killed: set[int] = set()

    def kill() -> None:
        killed.add(min(worker_processes()))
        os.kill(min(killed), signal.SIGKILL)

    stages = ("calibrating and quantizing", "predicting what each unit costs")
    listener, output = Listener(stages[1:], kill), tmp_path / "tiny-moec"
    source, before = checkpoint.as_uri(), set((home / CACHE).glob("*"))  # another test may have fetched before
    compile_tiny(source, output, data=str(problems), cluster=address, talk=listener.talk(), **OPTIONS)
    assert contents(output) == alone
    assert [path.name.split("-")[0] for path in (home / CACHE).iterdir() if path not in before] == ["tiny"]
    assert len(killed) == 1 and len(listener.processes) > 2, "another process took the place of the one killed"
    assert names(tmp_path) == {"tiny-moec"}
    check_bundle(output)
    assert "work goes to 2 of the 2 nodes of the cluster" in listener.notes
    for title in (*stages, "baseline on gsm8k", "bundle on gsm8k"):
        done, total = next(bar for name, bar in listener.bars.items() if name.startswith(title))
        assert done == total, f"`{title}` went to its end"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "value"), [("bits_per_weight", 4.0), ("loss", 0.03)])
def test_with_little_memory_the_bytes_are_those_of_one_machine(
    address: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, value: float
) -> None:
    """No layer stays in memory between passes. For a target in bits, a worker is killed after the first layer.

    Workers quantize and price experts. For a loss target they also answer for plans and both sides of the certificate.
    """
    little_memory(monkeypatch.setattr)
    monkeypatch.setattr("moec.compiler.cluster.session.experts_priced_by", noted_prices(priced := list[int]()))
    answered, send = list[str](), ClusterSession.open_runtime

    def sent(session: ClusterSession, partial: Path, memory_bytes: int) -> Any:
        answered.append(partial.name)
        return send(session, partial, memory_bytes)

    monkeypatch.setattr(ClusterSession, "open_runtime", sent)
    texts = save_texts(tmp_path / "texts", validation=20)
    options: dict[str, Any] = {"data": str(texts), "tasks": ("perplexity",), "bits": (2, 3, 4, 8), "quick": False}
    options |= {"group_sizes": (32,), "dense_bits": 8}
    compile_tiny(checkpoint, tmp_path / "alone", kind, value, **options)
    stages = ("calibrating and quantizing",) if kind == "bits_per_weight" else ()
    listener = Listener(stages, lambda: os.kill(min(worker_processes()), signal.SIGKILL))
    output, talk = tmp_path / "out", listener.talk()
    compile_tiny(checkpoint, output, kind, value, cluster=address, talk=talk, **options)
    assert contents(output) == contents(tmp_path / "alone")
    assert "work goes to 2 of the 2 nodes of the cluster" in listener.notes
    assert not stages or len(listener.processes) > 2, "another process took the place of the one killed"
    assert names(tmp_path) == {"texts", "alone", "out"}, "no bundle of a trial"
    kinds = {"unquantized" if "unquantized" in name else "trial" if "trial" in name else "bundle" for name in answered}
    assert kinds == ({"unquantized", "trial", "bundle"} if kind == "loss" else set())
    assert priced == [1, 1, 1, 0, 0, 0], "three experts of each layer, from the last to the first"


def noted_prices(priced: list[int]) -> Callable[[Any], Any]:
    """Wrap `experts_priced_by`, and return the layers of all experts with a price."""

    def priced_by(pool: Any) -> Any:
        price = experts_priced_by(pool)

        def found(store: Any, layer: int, *handed: Any) -> Iterator[Any]:
            for squares in price(store, layer, *handed):
                priced.append(layer)
                yield squares

        return found

    return priced_by


@pytest.mark.slow
def test_a_node_that_goes_away_leaves_its_work_to_the_others(
    cluster: Any, checkpoint: Path, problems: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    third = cluster.add_node(num_cpus=1)
    listener = Listener({"calibrating and quantizing"}, lambda: cluster.remove_node(third, allow_graceful=False))
    output = tmp_path / "tiny-moec"
    compile_tiny(checkpoint, output, data=str(problems), cluster=cluster.address, talk=listener.talk(), **OPTIONS)
    assert "work goes to 3 of the 3 nodes of the cluster" in listener.notes
    assert contents(output) == alone


def test_a_node_that_does_not_see_the_checkpoint_is_named(address: str, checkpoint: Path, tmp_path: Path) -> None:
    """Files in memory exist only for this process."""
    import fsspec

    url = f"memory://models-{tmp_path.name}/tiny"
    fsspec.filesystem("memory").put(str(checkpoint), url, recursive=True)
    with pytest.raises(OptionError, match=rf"node .+ does not see the checkpoint `{url}`: no folder") as caught:
        compile_tiny(url, tmp_path / "tiny-moec", "bits_per_weight", 3.5, cluster=address)
    assert "a path that all nodes share" in str(caught.value.hint)
    assert names(tmp_path) == set(), "nothing is left"


@dataclass
class Counting:
    """A job that returns its value, or the object of a handle. It refuses negative values."""

    value: int
    of: Any = None

    def run(self, site: Site) -> int:
        if self.value < 0:
            raise ContextOverflow("a text has 9 tokens", "shorten the text")
        found: int = self.value if self.of is None else site.fetch([self.of])[0]
        return found


@dataclass
class Dying:
    """A job that ends its worker."""

    def run(self, site: Site) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_job_raises_is_raised_here_and_what_kills_workers_ends(
    address: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(ray_pool, "RESTARTS", 0)
    opened = open_checkpoint(str(checkpoint))
    options: dict[str, Any] = {"bundle_bytes": 0, "open_runtime": open_partial, "talk": Talk()}
    connected = partial(ray_pool.connected, address, str(checkpoint), opened, **options)
    too_much = connected(worker_bytes=lambda cpus: cpus << 60)
    with pytest.raises(DoesNotFit, match=r"no node of the cluster at .+ has them"), too_much:
        pass
    with connected(worker_bytes=lambda cpus: cpus << 20) as pool:
        assert list(pool.in_order(Counting(value) for value in range(9))) == list(range(9))
        handles = [pool.put(3 * value) for value in range(9)]
        fetched = list(pool.in_order(Counting(0, of=handle) for handle in handles))
        assert fetched == [3 * value for value in range(9)], "workers fetch what a handle names"
        with pytest.raises(ContextOverflow, match=r"^node [0-9.]+: a text has 9 tokens") as caught:
            list(pool.in_order([Counting(1), Counting(-1)]))
        assert caught.value.hint == "shorten the text"
        with pytest.raises(RuntimeError, match="at another iteration"):
            next(pool.in_order([Counting(1)]))
        with pytest.raises(ExecutionError, match="a worker died 1 times: "):
            list(ray_pool.Pool(ray, pool.actors, 1, Talk()).in_order([Dying()]))


@pytest.mark.parametrize(
    ("given", "where"),
    [("127.0.0.1:1", "at `127[.]0[.]0[.]1:1`"), ("nowhere", "at `nowhere`"), ("127.0.0.1:99999", "at `127.+`")],
)
def test_no_cluster_at_an_address(given: str, where: str, checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'moec[cluster]'")
    with pytest.raises(OptionError, match=rf"no Ray cluster answers {where}: ") as caught:
        compile_tiny(checkpoint, tmp_path / "tiny-moec", "bits_per_weight", 3.5, cluster=given)
    assert "ray start --head" in str(caught.value.hint)


def test_without_ray_the_extra_is_named(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match="`--cluster` needs the package `ray`") as caught:
        compile_tiny(checkpoint, tmp_path / "tiny-moec", "bits_per_weight", 3.5, cluster="auto")
    assert caught.value.hint == 'pip install "moec[cluster]"'


def test_a_node_that_would_compute_something_else_is_named() -> None:
    own, here, notes = ray_pool.installed(), ray_pool.instruction_set(), list[str]()
    assert {"moec", "torch", "transformers", "numpy"} <= set(own)

    wanted = 0

    def check(report: NodeReport) -> None:
        ray_pool.check_node(
            "pi (10.0.0.7)", report, ray_pool.NodeNeeds("/models/tiny", "same", wanted), Talk(notes.append)
        )

    check(NodeReport(own, here, "same"))
    assert not notes
    check(NodeReport(own, "aarch64 DEFAULT", "same"))
    assert notes == [
        f"node pi (10.0.0.7) computes with aarch64 DEFAULT, this machine with {here}: last bits may differ"
    ]
    for package in own:
        expected = re.escape(f"node pi (10.0.0.7) has {package} 0.0.1, expected {own[package]} as here")
        with pytest.raises(OptionError, match=expected):
            check(NodeReport({**own, package: "0.0.1"}, here, "same"))
    with pytest.raises(OptionError, match=r"has torch .none., expected"):
        check(NodeReport({name: version for name, version in own.items() if name != "torch"}, here, "same"))
    with pytest.raises(OptionError, match="does not see the checkpoint `/models/tiny`: another checkpoint lies there"):
        check(NodeReport(own, here, "another"))
    with pytest.raises(OptionError, match="does not see the checkpoint `/models/tiny`: no folder"):
        check(NodeReport(own, here, problem=CheckpointError("no folder")))
    wanted = 1000
    check(NodeReport(own, here, "same", 1000))
    with pytest.raises(DoesNotFit, match=r"has 999 bytes free for temporary files, .* take 1000"):
        check(NodeReport(own, here, "same", 999))
