"""The sampling that a bundle recommends, and how options of a user change it."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.bundle import MANIFEST_NAME, FileEntry
from moec.manifests.codec import decode_manifest, encode_manifest
from moec.manifests.errors import ChecksumMismatch, ManifestInvalid, OptionError
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.text.generation_defaults import (
    GENERATION_NAME,
    PLAIN,
    recommended_sampling,
    sampling_text,
    with_given,
    without_limits,
)
from moec.runtime.text.sampling import SamplingOptions

EXAMPLE = Path(__file__).parents[3] / "examples" / "bundle"
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
OF_QWEN = SamplingOptions(temperature=0.6, top_k=20, top_p=0.95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("defaults") / "bundle"))


def recommended(folder: Path, content: Any) -> SamplingOptions | None:
    """Return what a bundle with this file recommends. None: it has no file."""
    manifest = decode_manifest((folder / MANIFEST_NAME).read_bytes(), "test")
    files = [entry for entry in manifest.files if entry.name != GENERATION_NAME]
    (folder / GENERATION_NAME).unlink(missing_ok=True)
    if content is not None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / GENERATION_NAME).write_bytes(data)
        files.append(FileEntry(GENERATION_NAME, len(data), hashlib.sha256(data).hexdigest()))
    listed = tuple(sorted(files, key=lambda entry: entry.name))
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(replace(manifest, files=listed)))
    with open_bundle(folder) as opened:
        return recommended_sampling(opened, verify=True)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, None),
        ({"eos_token_id": 1}, None),
        ({"temperature": None, "do_sample": None}, None),
        (QWEN, OF_QWEN),
        ({"do_sample": True}, PLAIN),
        ({"do_sample": True, "temperature": 1, "top_k": -1, "min_p": 0.1}, replace(PLAIN, min_p=0.1)),
        ({"do_sample": False}, SamplingOptions()),
        ({**QWEN, "do_sample": False, "repetition_penalty": 1.05}, SamplingOptions(repetition_penalty=1.05)),
        ({"temperature": 0.0, "top_p": 0.9}, SamplingOptions()),
        ({"top_p": 0.8}, replace(PLAIN, top_p=0.8)),
    ],
    ids=str,
)
def test_what_a_bundle_recommends(folder: Path, content: Any, wanted: SamplingOptions | None) -> None:
    assert recommended(folder, content) == wanted


@pytest.mark.gate("G10")
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is not JSON"),
        (b"[" * 9999, "is not JSON"),
        (b"[]", "must be an object"),
        ({"temperature": "0.6"}, "key `temperature`: expected a number"),
        ({"temperature": True}, "key `temperature`: expected a number"),
        (b'{"temperature": 1' + b"0" * 3000 + b"}", "key `temperature`: expected a number"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 2}, "top-p must be"),
        ({"repetition_penalty": 0}, "the repetition penalty must be"),
        ({"top_k": 1.5}, "key `top_k`: expected"),
        ({"top_k": -2}, "key `top_k`: expected"),
        ({"do_sample": 1}, "key `do_sample`: expected true or false"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_damaged_recommendation_is_refused(folder: Path, content: Any, fault: str) -> None:
    with pytest.raises(ManifestInvalid, match="generation_config") as raised:
        recommended(folder, content)
    assert fault in raised.value.message


def test_an_altered_recommendation_is_refused(folder: Path) -> None:
    recommended(folder, QWEN)
    path = folder / GENERATION_NAME
    path.write_bytes(path.read_bytes().replace(b"0.6", b"9.9"))
    with open_bundle(folder) as opened, pytest.raises(ChecksumMismatch):
        recommended_sampling(opened, verify=True)


def test_options_of_a_user_count_more() -> None:
    assert with_given(OF_QWEN, {}) == OF_QWEN
    assert with_given(OF_QWEN, {"temperature": 0.9}) == replace(OF_QWEN, temperature=0.9)
    assert with_given(replace(OF_QWEN, repetition_penalty=1.2), {"temperature": 0.0}) == SamplingOptions()
    assert with_given(SamplingOptions(), {"top_p": 0.9}) == replace(PLAIN, top_p=0.9)
    assert with_given(SamplingOptions(), {"top_p": 1.0, "top_k": 0}) == SamplingOptions()
    with pytest.raises(OptionError, match="no effect at temperature 0"):
        with_given(OF_QWEN, {"temperature": 0.0, "top_k": 5})
    assert without_limits({"temperature": 0.0, "top_k": 5, "min_p": 0.1}) == {"temperature": 0.0}


def test_sampling_as_text() -> None:
    assert sampling_text(OF_QWEN) == "temperature 0.6, top-k 20, top-p 0.95"
    assert sampling_text(SamplingOptions(repetition_penalty=1.1)) == (
        "the likeliest token (temperature 0), repetition penalty 1.1"
    )
