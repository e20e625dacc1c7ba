"""The implementations that a run takes: of the expert cache, and of a layer while one token is decoded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moec.manifests.bundle import BundleManifest

from ..expert_cache.open_cache import why_not_native
from ..options.runtime import RuntimeOptions
from .one_call import why_not_one_call


@dataclass(frozen=True, slots=True)
class CodePath:
    """The code that a run takes. Each implementation gives the same bits.

    why_not_native: why the expert cache is not the one of the extension; None if it is.
    why_not_one_call: why a token takes several steps per layer; None if it takes one call of the extension.
    """

    why_not_native: str | None
    why_not_one_call: str | None

    def to_text(self) -> str:
        """Return the end of the `mode:` line, like `cache native, layers in one call`."""
        cache = "native" if self.why_not_native is None else f"python ({self.why_not_native})"
        layers = "in one call" if self.why_not_one_call is None else f"in steps ({self.why_not_one_call})"
        return f"cache {cache}, layers {layers}"

    def to_plain(self) -> dict[str, Any]:
        """Return the values for `--json`."""
        kinds = {
            "cache": "native" if self.why_not_native is None else "python",
            "layers": "one call" if self.why_not_one_call is None else "steps",
        }
        return kinds | asdict(self)


def code_path(manifest: BundleManifest, options: RuntimeOptions, reads_ahead: bool = True) -> CodePath:
    """Return the code that a run of a bundle takes on this machine.

    reads_ahead: whether some experts do not fit into the cache.
    """
    return CodePath(
        why_not_native(options, manifest.model.encoder is not None), why_not_one_call(manifest, options, reads_ahead)
    )
