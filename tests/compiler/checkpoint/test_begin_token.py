"""The token at the beginning: `add_bos_token` is followed where tokenizer.json does not add one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from moec.compiler.checkpoint.tokenizer import load_tokenizer, tokenizer_bytes
from moec.manifests.tokenizer.special_tokens import with_special_tokens
from moec.manifests.tokenizer.tokenizer_file import check_tokenizer

BEGIN = 256


def _folder(folder: Path, post: str, settings: dict[str, object], named: dict[str, object] | None = None) -> Path:
    letters = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if post == "bytes":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    elif post:
        special = [("<s>", BEGIN), ("</s>", BEGIN + 1)]
        tokenizer.post_processor = processors.TemplateProcessing(single=post, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if named is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(named))
    return folder


@pytest.mark.parametrize("post", ["", "bytes", "$A </s>"])
@pytest.mark.parametrize("named", [None, {"bos_token": {"content": "<s>"}}])
def test_the_token_is_added_once_for_compile_and_runtime(
    post: str, named: dict[str, object] | None, tmp_path: Path
) -> None:
    settings = {"add_bos_token": True, **({} if named else {"bos_token": "<s>"})}
    folder = _folder(tmp_path, post, settings, named)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Hi").ids
    data = tokenizer_bytes(folder)
    check_tokenizer(data)
    assert load_tokenizer(folder).encode("Hi").ids == Tokenizer.from_buffer(data).encode("Hi").ids == [BEGIN, *plain]


@pytest.mark.parametrize(
    ("post", "settings"),
    [
        ("<s> $A", {"add_bos_token": True, "bos_token": "<s>"}),
        ("", {"add_bos_token": False, "bos_token": "<s>"}),
        ("", {"bos_token": "<s>"}),
        ("", {"add_bos_token": True}),
        ("", {"add_bos_token": True, "bos_token": "<absent>"}),
    ],
)
def test_other_tokenizers_keep_their_bytes(post: str, settings: dict[str, object], tmp_path: Path) -> None:
    folder = _folder(tmp_path, post, settings)
    assert tokenizer_bytes(folder) == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("config", "named", "expected"),
    [
        (b'{"a": 1}', b'{"bos_token": "<s>"}', {"a": 1, "bos_token": "<s>"}),
        (b'{"bos_token": "<a>"}', b'{"bos_token": "<s>"}', {"bos_token": "<s>"}),
        (b'{"bos_token": "<a>", "added_tokens_decoder": {}}', b'{"bos_token": "<s>"}', None),
        (b'{"bos_token": {"content": "<s>"}}', b'{"bos_token": "<s>"}', None),
        (b'{"a": 1}', b'{"bos_token": 5, "additional": "<s>"}', None),
        (b'{"a": 1}', b"{", None),
        (b"{", b'{"bos_token": "<s>"}', None),
        (b'{"a": 1}', b"[1]", None),
        (None, b'{"bos_token": "<s>"}', {"bos_token": "<s>"}),
        (None, None, None),
    ],
)
def test_special_tokens_of_both_files(config: bytes | None, named: bytes | None, expected: object) -> None:
    found = with_special_tokens(config, named)
    assert found == config if expected is None else found is not None and json.loads(found) == expected
