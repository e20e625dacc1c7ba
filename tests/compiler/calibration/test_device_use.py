"""Counts of devices take the place of calibration's, except where no traced bundle could have used an expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moec.compiler.calibration.device_use import MOST_TOKENS, DeviceUse, read_device_use
from moec.manifests.errors import InputError
from moec.manifests.expert_use import ExpertUse, SampledRoutes, architecture_digest, encode_use
from moec.manifests.model import ExpertsSpec, LayerSpec, SharedSpec
from tests.manifests.examples import layer_spec, model_spec

MODEL = model_spec([layer_spec(experts=4), layer_spec(experts=4), layer_spec(experts=4)])
EVEN = ((5, 5, 5, 5), (8, 6, 4, 2), (10, 10, 0, 0))
WHOLE = ((10, 10, 10, 10),) * 3


def use_of(chosen: tuple[tuple[int, ...], ...] = EVEN, **changes: object) -> ExpertUse:
    """Return ten tokens through three layers of four experts, top-2."""
    found = ExpertUse(architecture_digest(MODEL), (4, 4, 4), (2, 2, 2), 3, (10, 10, 10), chosen, WHOLE, ())
    return replace(found, **changes)  # type: ignore[arg-type]


def device_use(use: ExpertUse) -> DeviceUse:
    return DeviceUse("0" * 64, use, MODEL, ())


def routes(*tokens: tuple[tuple[int, int], ...]) -> bytes:
    return np.array(tokens, "<u2").tobytes()


def test_counts_are_taken_as_they_are_where_every_bundle_holds_every_expert() -> None:
    calibrated = np.full((3, 4), 7)
    assert device_use(use_of()).popularity(calibrated).tolist() == [list(row) for row in EVEN]
    assert device_use(use_of()).popularity(None).tolist() == [list(row) for row in EVEN]


def test_an_expert_that_no_bundle_holds_keeps_its_share_of_calibration() -> None:
    """Expert 3 of layer 0: a tenth of calibration's choices. The others share the rest as devices use them."""
    chosen, offered = ((10, 5, 5, 0), *EVEN[1:]), ((10, 10, 10, 0), *WHOLE[1:])
    use = device_use(use_of(chosen, offered=offered))
    calibrated = np.array([[30, 30, 30, 10], [1, 1, 1, 1], [1, 1, 1, 1]])
    found = use.popularity(calibrated)
    assert found[0].tolist() == [9, 4, 4, 2]  # 18 of 20 choices, half of them of expert 0
    assert found[1:].tolist() == [list(row) for row in EVEN[1:]]
    assert use.popularity(None)[0].tolist() == [8, 4, 4, 5]  # an even share is 5 of 20
    assert use.to_json()["experts_of_calibration"] == ["0.3"]


def test_an_expert_that_some_bundles_hold_has_the_share_of_their_tokens() -> None:
    """Half of the tokens passed bundles with expert 3. There 4 of 5 chose it."""
    use = device_use(use_of(((8, 4, 4, 4), *EVEN[1:]), offered=((10, 10, 10, 5), *WHOLE[1:])))
    rates = np.array([8 / 10, 4 / 10, 4 / 10, 4 / 5])
    expected = np.rint(10 * rates * 2 / rates.sum())
    assert use.popularity(None)[0].tolist() == expected.tolist() == [7, 3, 3, 7]


def test_many_tokens_fit_in_the_tables() -> None:
    many = 1 << 40
    chosen = tuple(tuple(count * many for count in row) for row in EVEN)
    use = use_of(chosen, tokens=(10 * many,) * 3, offered=tuple((10 * many,) * 4 for _ in range(3)))
    found = device_use(use).popularity(None)
    assert found.dtype == np.uint32 and found[1].tolist() == [round(MOST_TOKENS * c / 10) for c in EVEN[1]]


def test_routes_give_transitions_and_paths(tmp_path: Path) -> None:
    counted = routes(((0, 1), (1, 2), (2, 3)), ((0, 2), (1, 3), (2, 3)), ((1, 3), (1, 2), (0, 3)))
    held_out = routes(((0, 1), (1, 2), (2, 3)))
    (tmp_path / "a").write_bytes(encode_use(use_of(routes=(SampledRoutes(0, counted, held_out),))))
    tables = read_device_use(tmp_path / "a", MODEL).tables("pairs")
    assert tables.popularity.tolist() == [list(row) for row in EVEN]
    assert tables.transitions[0, 0].tolist() == [0, 3, 2, 1]  # after expert 0 of layer 0: three tokens
    assert tables.path_keys[0].tolist() == [2, 0, 1] and tables.router_quantiles.shape == (3, 0)
    first = (
        tables.path_experts[: tables.path_offsets[1]].tolist(),
        tables.path_counts[: tables.path_offsets[1]].tolist(),
    )
    assert first == ([2, 3], [3, 3])
    tables.check(MODEL)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (use_of(architecture="ab" * 32), "is of another model: 3 layers of 4 experts, top-2; the checkpoint has 3"),
        (
            use_of(top_k=(1, 2, 2), chosen=((10, 0, 0, 0), *EVEN[1:])),
            "is of another model: 3 layers of 4 experts, top-2",
        ),
        (use_of(routes=(SampledRoutes(0, routes(((0, 4), (1, 2), (2, 3))), b""),)), "an expert that does not exist"),
        (use_of(routes=(SampledRoutes(0, routes(((0, 0), (1, 2), (2, 3))), b""),)), "an expert twice in a layer"),
        (
            use_of(routes=(SampledRoutes(0, b"", b""), SampledRoutes(1, b"", b""))),
            r"expected routes from the layers \[0\]",
        ),
    ],
)
def test_a_file_of_another_model_is_refused(use: ExpertUse, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(encode_use(use))
    with pytest.raises(InputError, match=message) as caught:
        read_device_use(tmp_path / "a", MODEL)
    assert "\n" not in caught.value.message and "merge" in caught.value.hint


def test_layers_without_experts_have_no_counts() -> None:
    dense = LayerSpec(
        MODEL.layers[0].attention, ExpertsSpec(0, 0, 64, "silu", MODEL.layers[0].experts.router), SharedSpec(64)
    )
    model = model_spec([MODEL.layers[0], dense])
    use = ExpertUse(architecture_digest(model), (4, 0), (2, 0), 1, (10, 10), (EVEN[0], ()), (WHOLE[0], ()), ())
    assert DeviceUse("0" * 64, use, model, ()).popularity(None).tolist() == [[5, 5, 5, 5], [0, 0, 0, 0]]
