"""Ray: one worker process per node, jobs handed to whichever is free, results in order. No other file imports it.

Which worker takes a job, restarts and retries are Ray's: `ActorPool`, `max_restarts`, `max_task_retries`.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

import torch

from moec.manifests.errors import DoesNotFit, ExecutionError, MissingDependency, MoecError, OptionError

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.opening import open_checkpoint
from ..request.options import Talk
from ..request.ports import OpenRuntime
from .site import Handle, Site, checkpoint_identity

RESTARTS = 8
"""How often a worker is started again before the compile is given up. Its jobs are tried as often as it takes: while
a node that is gone is still taken for slow, Ray spends a try every few milliseconds."""
START_SECONDS = 300
"""A worker that has not started by then is done without: its node has no CPU or no memory to spare."""
CONNECT_SECONDS = 10
LOOK_SECONDS = 20
"""Between two looks at which nodes are still there, while nothing comes back."""
_PACKAGES = ("moec", "torch", "transformers", "numpy")


class Job(Protocol):
    """A job of jobs.py."""

    def run(self, site: Site) -> Any:
        """Return the result."""
        ...


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The state of a node before any work.

    versions: of everything that decides bits.
    cpu: its instruction set.
    identity: digest of its checkpoint.
    free_bytes: free bytes of its folder for temporary files.
    problem: the error with which its checkpoint was opened, or None.
    """

    versions: dict[str, str]
    cpu: str
    identity: str = ""
    free_bytes: int = 0
    problem: MoecError | None = None


class Pool:
    """Workers that answer jobs.

    actors: Ray's handles of the workers.
    count: workers.
    threads: passes that a worker runs at once.
    """

    def __init__(self, ray: Any, actors: Sequence[Any], threads: int, talk: Talk) -> None:
        from ray.util import ActorPool

        self._ray, self.actors, self._talk = ray, list(actors), talk
        self._pool = ActorPool(self.actors)
        self.count, self.threads = len(actors), threads
        self._missed: set[str] = set()
        self._is_busy = False

    def put(self, value: Any) -> Handle:
        """Hold an object in the cluster for as long as somebody has its handle."""
        return self._ray.put(value)

    def per_job(self, parts: int) -> int:
        """Return the number of independent parts in a job, so that all workers get parts and fill their threads."""
        return max(1, min(2 * self.threads, -(-parts // self.count)))

    def in_order(self, jobs: Iterable[Job]) -> Iterator[Any]:
        """Yield results in the order of the jobs; a job is taken from `jobs` when a worker is free.

        Raises what a job raised; ExecutionError where workers die of a job. One such iteration runs at a time, and none
        after one that was left early: its jobs are still at work.
        """
        if self._is_busy:
            raise RuntimeError("the workers are at another iteration")
        self._is_busy = True
        waiting, done = enumerate(jobs), dict[int, Any]()
        is_all, position = False, 0

        def start(actor: Any, item: tuple[int, Job]) -> Handle:
            return actor.run.remote(*item)

        while not is_all or self._pool.has_next():
            while not is_all and self._pool.has_free():
                item = next(waiting, None)
                if item is None:
                    is_all = True
                else:
                    self._pool.submit(start, item)
            if self._pool.has_next():
                index, result = self._next()
                done[index] = result
            while position in done:
                yield done.pop(position)
                position += 1
        self._is_busy = False

    def on_all(self, job: Job) -> None:
        """Have every worker do a job of which nothing comes back; one that has died has nothing to do."""
        answers = [actor.run.remote(0, job) for actor in self.actors]
        for answer in answers:
            with suppress(self._ray.exceptions.RayError):
                self._ray.get(answer)

    def _next(self) -> tuple[int, Any]:
        errors = self._ray.exceptions
        while True:
            try:
                result: tuple[int, Any] = self._pool.get_next_unordered(timeout=LOOK_SECONDS)
                return result
            except TimeoutError:
                self._look_for_nodes()
            except errors.RayTaskError as error:
                if isinstance(error.cause, MoecError):
                    raise error.cause from None
                raise
            except errors.RayError as error:
                raise ExecutionError(
                    f"a worker died {RESTARTS + 1} times: {_first_line(error)}",
                    "look into its node's memory and the files in `/tmp/ray/session_latest/logs`, then `--resume`",
                ) from error

    def _look_for_nodes(self) -> None:
        """Say once of a node that it is gone: what it had waits for memory on another, or for a node that joins."""
        for node in self._ray.nodes():
            if not node["Alive"] and node["NodeID"] not in self._missed:
                self._missed.add(node["NodeID"])
                self._talk.note(f"node {node_name(node)} left the cluster; its work goes to a node with memory for it")


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """The needs of every node.

    source: path or URL of the checkpoint.
    identity: digest of the checkpoint.
    bundle_bytes: free bytes for temporary files.
    """

    source: str
    identity: str
    bundle_bytes: int


class Worker:
    """The process on a node. It has a Site, which is made anew when Ray restarts the process."""

    def __init__(self, source: str, identity: str, threads: int, open_runtime: OpenRuntime, memory_bytes: int) -> None:
        import ray

        self._where, self._source = f"node {ray.util.get_node_ip_address()}", source
        self._site = Site(source, identity, threads, open_runtime, lambda keys: ray.get(list(keys)), memory_bytes)

    def look(self) -> NodeReport:
        """Return the state of this node, before any work."""
        try:
            identity = checkpoint_identity(open_checkpoint(self._source))
        except MoecError as error:
            return NodeReport(installed(), instruction_set(), problem=error)
        return NodeReport(installed(), instruction_set(), identity, shutil.disk_usage(tempfile.gettempdir()).free)

    def run(self, index: int, job: Job) -> tuple[int, Any]:
        """Return the index of a job and its result."""
        try:
            result = job.run(self._site)
        except MoecError as error:
            error.message = f"{self._where}: {error.message}"
            raise
        return index, result


def installed() -> dict[str, str]:
    """Return the versions of everything that decides bits."""
    versions = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def instruction_set() -> str:
    """Return the instruction set of torch. Where it differs, the last bit of a product may differ."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def node_name(node: dict[str, Any]) -> str:
    """Return the name of a node of `ray.nodes()` for messages."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


@contextmanager
def connected(
    address: str,
    source: str,
    checkpoint: Checkpoint,
    worker_bytes: Callable[[int], int],
    bundle_bytes: int,
    open_runtime: OpenRuntime,
    talk: Talk,
) -> Iterator[Pool]:
    """Workers on all nodes of the cluster at an address; `auto`: of the one that runs on this machine.

    source: the checkpoint as workers name it. worker_bytes: memory that one takes on so many CPUs; bundle_bytes: room
    for files that it needs. A process that is in a cluster already stays in it, whatever the address.
    Raises MissingDependency, OptionError (no cluster there; a node has other versions, or not the checkpoint),
    DoesNotFit (no node has the memory, or one not the room).
    """
    ray = _load()
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray, address)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        needs = [worker_bytes(_cpus(node)) for node in nodes]
        fitting = [node for node, need in zip(nodes, needs, strict=True) if node["Resources"].get("memory", 0) >= need]
        if not fitting:
            least = min(needs, default=worker_bytes(1))
            raise DoesNotFit(
                f"a worker takes {least} bytes of memory, and no node of the cluster at `{address}` has them",
                "add a larger node; what `ray start --memory` says counts",
            )
        identity = checkpoint_identity(checkpoint)
        actors = [_worker(ray, node, worker_bytes(_cpus(node)), source, identity, open_runtime) for node in fitting]
        try:
            wanted = NodeNeeds(source, identity, bundle_bytes)
            started = _checked(ray, fitting, actors, wanted, talk)
            talk.note(f"work goes to {len(started)} of the {len(nodes)} nodes of the cluster")
            yield Pool(ray, started, min(_cpus(node) for node in fitting), talk)
        finally:
            for actor in actors:
                with suppress(ray.exceptions.RayError):  # the cluster may be gone, which has been said by then
                    ray.kill(actor)
    finally:
        if is_ours:
            ray.shutdown()


def _load() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"`--cluster` needs the package `{error.name}`, which is not installed", 'pip install "moec[cluster]"'
        ) from error


def _connect(ray: Any, address: str) -> None:
    """Join the cluster. Raises OptionError where there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # `auto` may find the address of a cluster that has ended; one attempt takes half a minute, Ray's default is twenty.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal() and "/" not in address:  # Ray tries for minutes to reach what is not there
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (OSError, ValueError, OverflowError, RuntimeError, AssertionError, ray.exceptions.RayError) as error:
        where = "on this machine" if address == "auto" else f"at `{address}`"
        raise OptionError(
            f"no Ray cluster answers {where}: {_first_line(error)}",
            "`ray start --head` here, and `ray start --address=THIS_MACHINE:6379` on the others",
        ) from error


def _worker(
    ray: Any, node: dict[str, Any], worker_bytes: int, source: str, identity: str, open_runtime: OpenRuntime
) -> Any:
    """The worker of a node, which fills all of its CPUs.

    It asks for one CPU to be placed and, as Ray's actors do, for none while it runs: so it can be restarted on another
    node when its own is gone.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    options = {"max_restarts": RESTARTS, "max_task_retries": -1, "memory": worker_bytes, "scheduling_strategy": place}
    memory_bytes = int(node["Resources"].get("memory", 0))
    return ray.remote(**options)(Worker).remote(source, identity, _cpus(node), open_runtime, memory_bytes)


def _checked(
    ray: Any, nodes: Sequence[dict[str, Any]], actors: Sequence[Any], wanted: NodeNeeds, talk: Talk
) -> list[Any]:
    """The workers that start in time, each on a node that computes the same. Raises OptionError, ExecutionError."""
    answers = [actor.look.remote() for actor in actors]
    progress, in_time = talk.progress("asking the nodes"), list[Any]()
    for done in range(1, len(answers) + 1):
        in_time, late = ray.wait(answers, num_returns=done, timeout=START_SECONDS)
        progress(done, len(answers))
        if late and len(in_time) < done:
            break
    if not in_time:
        raise ExecutionError(
            f"no worker started on {len(nodes)} nodes in {START_SECONDS} s",
            "look at `ray status` for what takes the cluster",
        )
    for node, answer in zip(nodes, answers, strict=True):
        if answer not in in_time:
            talk.note(f"no worker started on node {node_name(node)} in {START_SECONDS} s; the others do without it")
            continue
        try:
            check_node(node_name(node), ray.get(answer), wanted, talk)
        except ray.exceptions.RayError as error:
            raise OptionError(
                f"node {node_name(node)} cannot run moec: {_first_line(error)}",
                'install the same there: pip install "moec[cluster]"',
            ) from error
    return [actor for actor, answer in zip(actors, answers, strict=True) if answer in in_time]


def check_node(name: str, report: NodeReport, wanted: NodeNeeds, talk: Talk) -> None:
    """Refuse a node that would compute something else, or cannot. Raises OptionError, DoesNotFit."""
    for package, version in installed().items():
        if report.versions.get(package) != version:
            raise OptionError(
                f"node {name} has {package} {report.versions.get(package, '(none)')}, expected {version} as here",
                "install the same versions on every node",
            )
    if report.problem is not None or report.identity != wanted.identity:
        reason = "another checkpoint lies there" if report.problem is None else report.problem.message
        raise OptionError(
            f"node {name} does not see the checkpoint `{wanted.source}`: {reason}",
            "put it on a path that all nodes share, or give an fsspec URL",
        ) from report.problem
    if report.free_bytes < wanted.bundle_bytes:
        raise DoesNotFit(
            f"node {name} has {report.free_bytes} bytes free for temporary files, and the bundles that answer there "
            f"take {wanted.bundle_bytes}",
            "set TMPDIR to a larger folder before `ray start` there",
        )
    if report.cpu != instruction_set():
        talk.note(
            f"node {name} computes with {report.cpu}, this machine with {instruction_set()}: last bits may differ"
        )


def _cpus(node: dict[str, Any]) -> int:
    return int(node["Resources"]["CPU"])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
