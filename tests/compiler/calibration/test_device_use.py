"""Counts of devices take the place of calibration's; tables, expected reads and plan of a compile follow them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.cli.simulation.traces import trace_header
from moec.compiler.calibration.device_use import MOST_TOKENS, DeviceUse, read_device_use
from moec.compiler.forecast import forecast
from moec.compiler.pipeline import compile_checkpoint
from moec.compiler.request.options import Talk
from moec.compiler.search.pruning import left_out_losses
from moec.manifests.errors import InputError
from moec.manifests.expert_use import ExpertUse, SampledRoutes, architecture_digest, encode_use
from moec.manifests.model import ExpertKey, ExpertsSpec, LayerSpec, SharedSpec
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.trace.merging import merge_traces
from moec.runtime.trace.trace import TraceRecorder
from moec.runtime.trace.trace_file import growing_trace
from tests.manifests.examples import layer_spec, model_spec
from tests.tiny_compile import check_bundle, compile_tiny, contents, make_request, save_model

pytestmark = pytest.mark.usefixtures("one_thread")

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("used") / "tiny", layers=4, experts=4)


@pytest.fixture(scope="module")
def plain(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle at 16 bits with the statistics of its calibration: it routes as the checkpoint does."""
    output = tmp_path_factory.mktemp("plain") / "bundle"
    compile_tiny(model, output, "uniform", 16, data=str(texts), dense_bits=16, path_keys="pairs")
    return output


def trace_texts(bundle: Path, texts: Sequence[str], folder: Path) -> list[Path]:
    """Record the trace of each text as a prompt, as `moec run --trace-out` does."""
    paths = [folder / f"{number}.trace" for number in range(len(texts))]
    with load(bundle) as engine:
        for text, path in zip(texts, paths, strict=True):
            tokens = engine.encode(text)
            with growing_trace(path, trace_header(engine, len(tokens))) as take:
                engine.model.trace = recorder = TraceRecorder(
                    engine.model.times, lambda: engine.cache.stats, keeps_scores=False, take=take
                )
                for _ in engine.generate(tokens, 1):
                    pass
                recorder.end()
                engine.model.trace = None
    return paths


def popularity_file(path: Path, bundle: Path, favourites: int, **changes: Any) -> Path:
    """Write a file in which every token uses the experts `favourites` and `favourites` + 1 of each layer."""
    spec, tokens = open_bundle(bundle).manifest.model, 1000
    chosen = tuple(tokens if e in (favourites, favourites + 1) else 0 for e in range(4))
    fields = {"tokens": (tokens,) * 4, "chosen": (chosen,) * 4, "offered": ((tokens,) * 4,) * 4, "routes": ()}
    use = ExpertUse(architecture_digest(spec), (4,) * 4, (2,) * 4, 1, **{**fields, **changes})
    path.write_bytes(encode_use(use))
    return path


def test_traces_of_the_calibration_text_give_the_tables_of_calibration(
    model: Path, texts: Path, plain: Path, tmp_path: Path
) -> None:
    """The runtime counts on a device what calibration counts in torch: popularity, transitions and paths."""
    rows = [json.loads(line)["text"] for line in (texts / "train.jsonl").read_text().splitlines()]
    use = merge_traces(trace_texts(plain, rows, tmp_path), lambda done, total: None)
    (tmp_path / "use").write_bytes(encode_use(use))
    calibrated, told = open_bundle(plain).tables(), open_bundle(plain).manifest.calibration
    assert told is not None and use.decoded_tokens == told.tokens
    for name, options in (("with", {"data": str(texts)}), ("without", {})):
        more = {**options, "path_keys": "pairs"} if options else {}
        compile_tiny(model, tmp_path / name, "uniform", 4, popularity=tmp_path / "use", **more)
        check_bundle(tmp_path / name)
        found = open_bundle(tmp_path / name).tables()
        assert np.array_equal(found.popularity, calibrated.popularity)
        assert found.paths is not None and calibrated.paths is not None and len(found.paths.keys)
        fields = ("transitions", "keys", "offsets", "experts", "counts")
        for field in fields if options else fields[:1]:  # without data the path report chooses the keys
            assert np.array_equal(getattr(found.paths, field), getattr(calibrated.paths, field)), field
    manifest = open_bundle(tmp_path / "without").manifest
    assert manifest.calibration is None and manifest.cost.expected_read_bytes_per_token > 0


def test_the_plan_gives_fewer_bytes_to_the_experts_that_devices_read(
    model: Path, texts: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fleets with opposite use: each bundle reads fewer bytes per token with its own use than the other one does.

    How well the price of leaving out an expert is known depends on calibration text alone.
    """
    plans, reads, known = {}, {}, list[np.ndarray]()

    def spied(store: Any, prices: Any, tokens: np.ndarray) -> Any:
        known.append(tokens)
        return left_out_losses(store, prices, tokens)

    monkeypatch.setattr("moec.compiler.stages.planning.left_out_losses", spied)
    for favourites in (0, 2):
        path = popularity_file(tmp_path / str(favourites), plain, favourites)
        result = compile_tiny(
            model, tmp_path / f"bundle-{favourites}", "kl", 0.01, data=str(texts), objective="bytes-per-token",
            prune=True, swaps=0, popularity=path,
        )  # fmt: skip
        plans[favourites] = result.plan
        reads[favourites] = open_bundle(tmp_path / f"bundle-{favourites}").manifest.cost.expected_read_bytes_per_token
        quality = json.loads((tmp_path / f"bundle-{favourites}" / "quality.json").read_text())
        assert quality["statistics"]["popularity"][0][favourites] == 0.5
        assert quality["use_on_devices"]["traces"] == 1 and not quality["use_on_devices"]["has_paths"]

    def read_bytes(plan: Any, favourites: int) -> int:
        keys = [ExpertKey(layer, favourites + e) for layer in range(4) for e in (0, 1)]
        return int(sum(plan.expert_padded_bytes(key) for key in keys))

    assert read_bytes(plans[0], 0) < read_bytes(plans[2], 0) and read_bytes(plans[2], 2) < read_bytes(plans[0], 2)
    assert reads == {favourites: read_bytes(plans[favourites], favourites) for favourites in (0, 2)}
    calibrated = open_bundle(plain).tables().popularity
    assert len(known) == 2 and all(np.array_equal(tokens, calibrated) for tokens in known)


def test_a_bundle_names_the_file_and_repeats(model: Path, texts: Path, plain: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    offered = ((1000, 1000, 1000, 0), *((1000,) * 4,) * 3)
    use = popularity_file(tmp_path / "use", plain, 1, offered=offered)
    for name in ("a", "b"):
        compile_tiny(model, tmp_path / name, "uniform", 4, data=str(texts), popularity=use, talk=Talk(notes.append))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    options = open_bundle(tmp_path / "a").manifest.options
    assert len(options["popularity"]) == 64
    compile_tiny(model, tmp_path / "c", "uniform", 4, data=str(texts))
    assert "popularity" not in open_bundle(tmp_path / "c").manifest.options
    assert "use_on_devices" not in json.loads((tmp_path / "c" / "quality.json").read_text())
    assert any("the use of experts is that of 1 trace, of 1,000 tokens; calibration has" in note for note in notes)
    assert any("no traced bundle holds the experts 0.3: their use is that of calibration" in note for note in notes)


def test_what_is_of_another_model_is_refused_before_any_work(
    model: Path, texts: Path, plain: Path, tmp_path: Path
) -> None:
    other = popularity_file(tmp_path / "other", plain, 0)
    wider = save_model(tmp_path / "wider", layers=4, experts=4, width=128)
    request = make_request(wider, tmp_path / "out", "kl", 0.1, data=str(texts), popularity=other)
    for run in (compile_checkpoint, forecast):
        with pytest.raises(InputError, match="is of another model"):
            run(request)
    (tmp_path / "bad").write_text("{}")
    with pytest.raises(InputError, match="is no popularity file"):
        compile_checkpoint(make_request(model, tmp_path / "out", "uniform", 4, popularity=tmp_path / "bad"))
    assert not list(tmp_path.glob("out*/*"))


def test_edgemoe_weighs_losses_by_the_use_on_devices(
    model: Path, texts: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    def stop(found: Any, specs: Any, trials: Any, target: Any, popularity: np.ndarray) -> Any:
        raise Stopped(popularity[0].tolist())

    monkeypatch.setattr("moec.compiler.stages.planning.with_popularity", stop)
    use = popularity_file(tmp_path / "use", plain, 1)
    given = {"data": str(texts), "quick": False, "search": "edgemoe-popularity", "group_sizes": (32,), "dense_bits": 8}
    with pytest.raises(Stopped) as caught:
        compile_tiny(model, tmp_path / "out", "kl", 0.5, popularity=use, **given)
    assert caught.value.args[0] == [0, 1000, 1000, 0]
