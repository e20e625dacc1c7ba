"""G11: bundles of every format version open and give their recorded results, on every instruction set.

Refusals of unknown versions are in tests/manifests/test_codec.py and tests/gates/test_g10_hostile.py.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner

from moec.cli.main import cli
from moec.manifests.bundle import DEVICE_NAME, EVICTION_NAME, LOOKAHEAD_NAME, MANIFEST_NAME, RELEASED_VERSION
from moec.manifests.codec import encode_manifest, manifest_schema
from moec.manifests.quant import BITWIDTHS, BYTE_SCALES_BITWIDTHS, PRUNED
from moec.manifests.self_test import SELF_TEST_NAME
from moec.runtime import kernels, load
from moec.runtime.bundle.archive import unpack_bundle
from moec.runtime.bundle.eviction_weights import fitted_weights
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.self_test import ARITHMETIC, run_self_test, self_test_of
from tests.gates.damage import plain_manifest, seal
from tests.gates.released_bundles import EXACT, TOLERANCE, differ, logits_of
from tests.manifests.examples import get, put

pytestmark = pytest.mark.gate("G11")
Unpacked = Callable[[str], Path]
RELEASED = Path(__file__).parent / "released"
NAMES = sorted(path.stem for path in RELEASED.glob("*.moec"))
# Errors of a reader that ignores a field: the default, or a near value; `...`: the field is missing.
MISREAD: list[tuple[str, str, Any]] = [
    ("compiled", "model.norm_eps", 1e-5),
    ("compiled", "model.layers[2].attention.rope.theta", 10_100.0),
    ("compiled", "model.layers[2].experts.router.renormalize", True),
    ("latent", "model.layers[0].attention.latent.norm_eps", 1e-5),
    ("latent", "model.layers[1].attention.rope.interleaved", False),
    ("latent", "model.layers[1].attention.rope.frequencies", []),
    ("latent", "model.layers[0].attention.scale", 0.0),
    ("latent", "model.layers[1].experts.router.scale", 1.0),
    ("latent", "model.layers[1].experts.router.correction", []),
    ("latent", "model.layers[1].experts.router.kept_groups", 2),
    ("sinks", "model.layers[0].attention.sliding_window", 6),
    ("sinks", "model.layers[0].attention.rope.magnitude", 1.0),
    ("sinks", "model.layers[1].experts.limit", 0.55),
    ("norms", "model.norm_eps", 2e-5),
    ("norms", "model.layers[0].experts.router.margin", ...),
    ("norms", "model.layers[1].experts.router.static", ...),
    ("norms", "model.layers[0].attention.rope.long.magnitude", 1.0),
    ("encoder", "model.layers[0].experts.router.capacity", ...),
    ("encoder", "model.encoder.start_token_id", 1),
    ("encoder", "model.layers[0].attention.relative_bias.max_distance", 64),
    ("gates", "model.layers[0].attention.output_gate", "sigmoid"),
    ("gates", "model.layers[1].attention.rope.theta", 2e4),
    ("after", "model.embedding_scale", 1.0),
    ("after", "model.layers[2].experts.router.corrects_logits", ...),
    ("delta", "model.norm_offset", ...),
    ("delta", "model.layers[0].delta.log_rates", [0.0, 0.0]),
    ("delta", "model.layers[0].delta.step_biases", [0.0, 0.0]),
    ("delta", "model.layers[0].delta.norm_eps", 1e-2),
    ("taps", "model.layers[2].experts.router.least_sum", ...),
    ("branches", "model.logit_softcap", ...),
    ("branches", "model.layers[0].scale", ...),
    ("branches", "model.layers[0].experts.activation", "silu"),
    ("branches", "model.layers[0].experts.router.norm_scale", 0.5),
    ("branches", "model.layers[1].experts.router.expert_scales", ...),
    ("branches", "model.layers[0].attention.value_norm", ...),
    ("versions", "model.embedding_scale", 1.0),
    ("versions", "model.residual_scale", 1.0),
    ("versions", "model.logits_scale", 1.0),
]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Unpacked:
    """Return the folder of a bundle. It is unpacked at the first call."""
    root = tmp_path_factory.mktemp("released")

    def unpack(name: str) -> Path:
        unpack_bundle(RELEASED / f"{name}.moec", root / name)
        return root / name

    return cache(unpack)


@pytest.fixture(params=kernels.available())
def each_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with every instruction set."""
    before = kernels.active()
    kernels.select(request.param)
    yield
    kernels.select(before)


def said_by(name: str) -> dict[str, Any]:
    """Return the recorded text, tokens and logits of a bundle."""
    said: dict[str, Any] = json.loads((RELEASED / f"{name}.json").read_bytes())
    for run in said["runs"]:
        run["logits"] = np.frombuffer(base64.b64decode(run["logits"]), "<f4")
    return said


def errors(bundle: Path, said: dict[str, Any]) -> list[float]:
    """Return the difference of each run from its record."""
    return [
        differ(logits_of(bundle, run["options"], said["prompt"], said["tokens"]), run["logits"]) for run in said["runs"]
    ]


@pytest.mark.usefixtures("each_set")
@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_said(name: str, unpacked: Unpacked) -> None:
    assert max(errors(unpacked(name), said_by(name))) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_every_command_takes_it(name: str, unpacked: Unpacked) -> None:
    """`verify`, `inspect`, the tokenizer and the schema accept it. The codec writes its manifest unchanged."""
    bundle = unpacked(name)
    for command in ("verify", "inspect"):
        result = CliRunner().invoke(cli, [command, str(bundle), "--json"])
        assert result.exit_code == 0 and json.loads(result.stdout), result.stderr
    with load(bundle, **EXACT) as engine:
        assert engine.encode(said_by(name)["text"]) == said_by(name)["prompt"]
    raw, manifest = (bundle / MANIFEST_NAME).read_bytes(), open_bundle(bundle).manifest
    jsonschema.validate(json.loads(raw), manifest_schema())
    assert encode_manifest(manifest) == raw


@pytest.mark.usefixtures("each_set")
def test_a_self_test_of_the_same_arithmetic_holds(unpacked: Unpacked) -> None:
    """Whoever changes the last bit of a logit raises ARITHMETIC and adds a bundle."""
    if kernels.active() == kernels.NUMPY:
        pytest.skip("numpy makes no promise")
    found = []
    for name in NAMES:
        with load(unpacked(name), context=64) as engine:
            if engine.bundle.has_file(SELF_TEST_NAME):
                found.append(self_test_of(engine.bundle))
                if found[-1].arithmetic == ARITHMETIC:
                    run_self_test(engine, found[-1])
    assert max(test.arithmetic for test in found) == ARITHMETIC


def test_every_version_and_every_format_is_kept(unpacked: Unpacked) -> None:
    """A new version or format needs a bundle: see tests/gates/released/README.md."""
    assert {path.stem for path in RELEASED.glob("*.json")} == set(NAMES)
    kept = [open_bundle(bundle).manifest for bundle in map(unpacked, NAMES)]
    assert {manifest.format_version for manifest in kept} == set(range(1, RELEASED_VERSION + 1))
    entries = [entry for manifest in kept for entry in manifest.stored_experts]
    specs = {spec for entry in entries for spec in (entry.gate, entry.up, entry.down) if spec is not None}
    assert {spec.bitwidth for spec in specs} == {*BITWIDTHS, PRUNED}
    assert {spec.bitwidth for spec in specs if spec.byte_scales} == set(BYTE_SCALES_BITWIDTHS)
    assert {manifest.path_sets for manifest in kept} == {True, False}
    assert {spec.float_type for spec in specs} == {"none", "bfloat16", "float16", "mxfp4"}
    assert any(manifest.low_experts for manifest in kept)
    files = {entry.name for manifest in kept for entry in manifest.files}
    assert {DEVICE_NAME, EVICTION_NAME, LOOKAHEAD_NAME, SELF_TEST_NAME} <= files


def test_fitted_weights_are_read(unpacked: Unpacked) -> None:
    (name,) = (name for name in NAMES if name.endswith("-fitted"))
    with open_bundle(unpacked(name)) as bundle:
        assert fitted_weights(bundle) == "0.25,0.5,0.125,0.125"


@pytest.mark.parametrize(("name", "path", "value"), MISREAD)
def test_the_gate_sees_a_field_that_is_misread(
    name: str, path: str, value: Any, unpacked: Unpacked, tmp_path: Path
) -> None:
    (kept,) = (each for each in NAMES if each.endswith(f"-{name}"))
    source, bundle = unpacked(kept), tmp_path / name
    shutil.copytree(source, bundle, copy_function=os.link)
    plain = plain_manifest(bundle)
    assert get(plain, path) != value
    put(plain, path, value)
    (bundle / MANIFEST_NAME).unlink()
    seal(bundle, plain)
    assert max(errors(bundle, said_by(source.name))) > 10 * TOLERANCE
