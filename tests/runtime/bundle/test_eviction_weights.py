"""`eviction.json` is compared with its digest. Its use and its form: tests/compiler/test_eviction_weights.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.manifests.bundle import EVICTION_NAME
from moec.manifests.errors import ChecksumMismatch
from moec.runtime.bundle.eviction_weights import fitted_weights
from moec.runtime.bundle.open_bundle import open_bundle
from tests.gates.bundles import emit_bundle
from tests.listed_file import add_listed
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

WEIGHTS = b'{"hobbit":{"fld":0.25,"lfu":0.5,"lhu":0,"lru":0.25}}'


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    save_tiny_mixtral(tmp_path / "tiny", TinyMixtral())
    return emit_bundle(tmp_path / "tiny", tmp_path / "tiny-moec")


def test_a_changed_byte_is_refused_where_digests_are_checked(bundle: Path) -> None:
    add_listed(bundle, EVICTION_NAME, WEIGHTS)
    (bundle / EVICTION_NAME).write_bytes(WEIGHTS.replace(b'"fld":0.25,"lfu":0.5', b'"fld":0.5,"lfu":0.25'))
    with open_bundle(bundle) as opened:
        with pytest.raises(ChecksumMismatch, match=EVICTION_NAME):
            fitted_weights(opened)
        assert fitted_weights(opened, verify=False) == "0.25,0.25,0,0.5"
