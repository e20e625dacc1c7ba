"""Prompts that do not fit are refused before they become tokens, and the number of bytes read is bounded."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers

from moec.cli.options.prompts import prompt_limit_bytes
from moec.manifests.errors import ContextOverflow, InputError
from moec.manifests.files.limits import ENCODING_BYTES_PER_BYTE, MAX_PROMPT_BYTES
from moec.runtime import load
from moec.runtime.memory.budget import MemoryPlan
from moec.runtime.text.tokenizer import BundleTokenizer, parse_tokenizer
from tests.cli.conftest import Invoke


class Counting(io.BytesIO):
    """Standard input without end that counts the bytes read."""

    given = 0

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None and size >= 0, "everything was asked for"
        self.given += size
        return b"a" * size


def test_standard_input_is_read_up_to_a_bound(invoke: Invoke, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.cli.options import prompts

    endless = Counting()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(endless))
    with pytest.raises(ContextOverflow, match="more than 1000 bytes"):
        prompts.standard_input(1000)
    assert endless.given == 1001
    assert prompt_limit_bytes(512) == 131_072 and prompt_limit_bytes(10**7) == MAX_PROMPT_BYTES


@pytest.mark.parametrize("given", ["a b\n", "a b\r\n", "a b"])
def test_line_ends(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.cli.options import prompts

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    assert prompts.standard_input(100) == "a b"


def test_what_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.cli.options import prompts

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    with pytest.raises(InputError, match="not UTF-8 at byte 2"):
        prompts.standard_input(100)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="is closed"):
        prompts.standard_input(100)


@pytest.mark.parametrize("options", [(), ("--chat",)])
def test_a_long_prompt_is_an_error_of_the_user(invoke: Invoke, bundle: Path, options: tuple[str, ...]) -> None:
    result = invoke("run", bundle, "--prompt", "-", *options, stdin="how many? " * 200_000)
    assert result.exit_code == 1 and "the prompt has more than" in result.stderr


def test_nothing_is_encoded_that_has_no_memory(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(bundle) as engine:
        plan = engine.memory
        limit = (plan.kv_bytes + plan.scratch_bytes + (8 << 20)) // ENCODING_BYTES_PER_BYTE
        assert limit >= 16 * plan.context
        engine.encode("a" * 100)
        monkeypatch.setattr(BundleTokenizer, "encode_batch", None)
        with pytest.raises(ContextOverflow, match=f"has {limit + 1} bytes"):
            engine.encode("a" * (limit + 1))
        with pytest.raises(InputError, match="not UTF-8 at character 1"):
            engine.encode("a\udcff")


def test_prompts_of_a_file(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "' + "how many? " * 100_000 + '"}\n')
    result = invoke("generate", bundle, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl", "--slots", 1)
    assert result.exit_code == 1 and "the prompt has 1000000 bytes" in result.stderr
    assert not (tmp_path / "o.jsonl").exists()


def test_what_the_normalizer_makes_of_a_text_counts(tmp_path: Path) -> None:
    """The growth of a text is measured, and not taken to be the largest possible growth."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.normalizer = normalizers.Replace("a", "a" * 1000)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer.json"
    loaded = parse_tokenizer(path.read_bytes(), path)
    sizes = dict.fromkeys(("process_bytes", "dense_bytes", "kv_bytes", "scratch_bytes", "minimum_expert_bytes"), 0)
    plan = MemoryPlan(**sizes, tables_bytes=0, cache_bytes=0, budget_bytes=None, context=512)
    loaded.check_size("b" * 16_000, plan)
    loaded.check_size("a" * 10 + "b" * 10_000, plan)
    with pytest.raises(ContextOverflow):
        loaded.check_size("a" * 1000, plan)
    with pytest.raises(ContextOverflow):
        loaded.check_size("b" * 17_000, plan)
