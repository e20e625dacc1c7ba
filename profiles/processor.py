"""Name the instruction sets of this processor that have kernels."""

from __future__ import annotations

from pathlib import Path

_FEATURES = {
    "amx": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "amx_tile", "amx_int8"},
    "avx512vnni": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
    "avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon-i8mm": {"asimd", "asimddp", "i8mm"},
    "neon-dot": {"asimd", "asimddp"},
    "neon": {"asimd"},
}
_SYSTEM = Path("/")


def instruction_sets(system: Path = _SYSTEM) -> tuple[str, ...]:
    """Return the instruction sets with kernels that this processor has, best first. `scalar` is always included."""
    features: set[str] = set()
    for line in read_text(system / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features = set(value.split())
            break
    return (*(name for name, needed in _FEATURES.items() if needed <= features), "scalar")


def read_text(path: Path) -> str:
    """Return a file of the system as text; empty if it is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
