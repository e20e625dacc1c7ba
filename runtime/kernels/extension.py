"""State of the C++ extension: whether it is installed, which kernels are in use, and the number of threads."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from moec.manifests.errors import KernelUnavailable

NUMPY = "numpy"
MAX_THREADS = 256
FOLDER = Path(__file__).parent
_NAME = "_native"


class KernelState:
    """The kernels that this process uses. Loaded on first use; `select` and `set_threads` change it."""

    def __init__(self) -> None:
        self.is_loaded = False
        self.extension: ModuleType | None = None
        self.uses_numpy = False
        self.thread_count = 1


state = KernelState()


def _load_extension() -> ModuleType | None:
    name = f"{__package__}.{_NAME}"
    if importlib.util.find_spec(name) is None:
        foreign = [path.name for path in FOLDER.glob(f"{_NAME}.*") if path.suffix in (".so", ".pyd")]
        if foreign:
            raise KernelUnavailable(
                f"the kernel extension `{foreign[0]}` is built for another python", "install moec again"
            )
        return None
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise KernelUnavailable(f"the kernel extension does not load: {error}", "install moec again") from error


def loaded() -> ModuleType | None:
    """Return the extension, also if its kernels are not in use; None if it is not installed.

    Raises KernelUnavailable if the extension does not load.
    """
    if not state.is_loaded:
        state.extension = _load_extension()
        state.is_loaded = True
    return state.extension


def compiled() -> ModuleType | None:
    """Return the extension if its kernels are in use; None if numpy computes."""
    extension = loaded()
    return None if state.uses_numpy else extension


def available() -> tuple[str, ...]:
    """Return the names of the kernels that run here, best first; `numpy` is always the last."""
    extension = loaded()
    return (*(extension.available() if extension else ()), NUMPY)


def active() -> str:
    """Return the name of the kernels in use, for example `avx2`, `scalar` or `numpy`."""
    extension = compiled()
    return str(extension.active()) if extension else NUMPY


def bfloat_kernels() -> str:
    """Return the name of the products with bfloat16 activations of the kernels in use; empty without them."""
    extension = compiled()
    return str(extension.bfloat_kernels()) if extension else ""


def select(name: str) -> None:
    """Use the kernels of this name from now on.

    Raises KernelUnavailable if this processor or build has no such kernels.
    """
    names = available()
    if name not in names:
        raise KernelUnavailable(f"no kernels `{name[:40]}` here, available: {', '.join(names)}")
    state.uses_numpy = name == NUMPY
    extension = compiled()
    if extension is not None:
        extension.select(name)


def set_threads(count: int) -> None:
    """Set the largest number of threads per call, 1 to MAX_THREADS. The numpy kernels ignore it.

    Raises ValueError.
    """
    if not 1 <= count <= MAX_THREADS:
        raise ValueError(f"threads: expected 1 to {MAX_THREADS}, found {count}")
    extension = loaded()
    if extension is not None:
        extension.set_threads(count)
    state.thread_count = count


def threads() -> int:
    """Return the number of threads that was set; 1 by default."""
    return state.thread_count
