"""Run llama.cpp's own converter on checkpoints, in a process of its own.

    python convert_gguf.py LLAMA_CPP FOLDER ...

LLAMA_CPP has its sources; `make gguf-converter` fills it. FOLDER.gguf gets the weights in float32.
The tokenizers of the tests are not those of the models, so all are written as that of GPT-2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Convert the folders one after the other."""
    sources, *folders = map(Path, sys.argv[1:])
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import convert_hf_to_gguf as converter
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    class_of = converter.get_model_class

    def with_plain_vocabulary(*names: Any, **more: Any) -> Any:
        found = class_of(*names, **more)
        found.set_vocab = lambda self: self._set_vocab_gpt2()
        return found

    converter.get_model_class = with_plain_vocabulary
    for folder in folders:
        sys.argv = ["convert", str(folder), "--outfile", f"{folder}.gguf", "--outtype", "f32"]
        if folder.name.startswith(("qwen3-next", "qwen3.5", "glm4")):  # layers for drafts, which they lack
            sys.argv.append("--no-mtp")
        converter.main()


if __name__ == "__main__":
    main()
