"""Bundle to tokens inside a hard memory budget. numpy, tokenizers and the C++ kernels; no torch.

engine = moec.runtime.load("model-moec", memory="2GiB")
for step in engine.generate("Question: ...", max_new_tokens=64):
    print(step.text, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.engine import Engine, GenerationStep, load
    from .options.runtime import RuntimeOptions

__all__ = ["Engine", "GenerationStep", "RuntimeOptions", "load"]


def __getattr__(name: str) -> Any:
    if name == "RuntimeOptions":
        from .options.runtime import RuntimeOptions

        return RuntimeOptions
    if name in __all__:
        from .engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module `moec.runtime` has no attribute `{name}`")
