"""The runtime on a bundle that is not published yet, and the threads of a compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from moec.manifests.errors import MemoryBudgetExceeded, MoecError, OptionError

if TYPE_CHECKING:
    from ...measuring.text_engines import BundleEngine


@contextmanager
def open_partial(path: Path, memory_bytes: int = 0, threads: int = 0) -> Iterator[BundleEngine]:
    """Open the runtime on a bundle that is not published yet, for the certificate.

    memory_bytes: the budget; 0: the default of the runtime.
    threads: threads that compute; 0: all processors of the process.
    """
    from moec.manifests.runtime_limits import ANSWER_SLOTS
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.options.runtime import RuntimeOptions

    from ...measuring.text_engines import BundleEngine
    from ...options.opening import with_fitting_slots

    if memory_bytes < 0:
        raise _too_little_memory(memory_bytes)
    bundle = open_bundle(path, allow_partial=True)
    memory = str(memory_bytes) if memory_bytes else None
    options = RuntimeOptions(slots=ANSWER_SLOTS, memory=memory, threads=threads)
    with ExitStack() as opened:
        try:
            engine = opened.enter_context(with_fitting_slots(lambda fitting: Engine(bundle, fitting), options))
        except MemoryBudgetExceeded as error:
            if not memory_bytes:
                raise
            raise _too_little_memory(memory_bytes) from error
        if memory_bytes:  # another engine shares the memory, so all pages of this one must be resident
            engine.cache.finish_warming()
        yield BundleEngine(engine)


def _too_little_memory(memory_bytes: int) -> MoecError:
    """Return the error of a compile whose memory leaves so many bytes for the runtime. They may be negative."""
    return MemoryBudgetExceeded(
        f"the memory of the compile leaves {memory_bytes >> 20} MiB to run its bundle, which needs more",
        "raise `--memory`, or leave it out",
    )


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch compute with this number of threads. None: its own default.

    Raises OptionError for a number that the runtime does not take.
    """
    if count is None:
        yield
        return
    from moec.runtime.options.runtime import MAX_THREADS

    if not 1 <= count <= MAX_THREADS:
        raise OptionError(f"`--threads` is {count}, expected 1 to {MAX_THREADS}", "leave it out for all processors")
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
