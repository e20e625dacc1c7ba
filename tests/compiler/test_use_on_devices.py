"""A compile with a popularity file: tables, expected reads and plan follow the use on devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.cli.simulation.traces import trace_header
from moec.compiler.forecast import forecast
from moec.compiler.pipeline import compile_checkpoint
from moec.compiler.request.options import Talk
from moec.compiler.search.pruning import left_out_losses
from moec.manifests.errors import InputError
from moec.manifests.expert_use import ExpertUse, architecture_digest, encode_use
from moec.manifests.model import ExpertKey
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.trace.merging import merge_traces
from moec.runtime.trace.trace import TraceRecorder
from moec.runtime.trace.trace_file import growing_trace
from tests.tiny_compile import check_bundle, compile_tiny, contents, make_request, save_model

pytestmark = pytest.mark.usefixtures("one_thread")


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
    use = popularity_file(tmp_path / "use", plain, 1)
    for name in ("a", "b"):
        compile_tiny(model, tmp_path / name, "uniform", 4, data=str(texts), popularity=use, talk=Talk(notes.append))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    options = open_bundle(tmp_path / "a").manifest.options
    assert len(options["popularity"]) == 64
    compile_tiny(model, tmp_path / "c", "uniform", 4, data=str(texts))
    assert "popularity" not in open_bundle(tmp_path / "c").manifest.options
    assert "use_on_devices" not in json.loads((tmp_path / "c" / "quality.json").read_text())
    assert any("the use of experts is that of 1 trace, of 1,000 tokens; calibration has" in note for note in notes)


def test_an_expert_that_devices_never_held_keeps_the_use_of_calibration(
    model: Path, texts: Path, plain: Path, tmp_path: Path
) -> None:
    """The traced bundle leaves out expert 3 of layer 0."""
    offered = ((1000, 1000, 1000, 0), *((1000,) * 4,) * 3)
    use = popularity_file(tmp_path / "use", plain, 0, offered=offered)
    notes: list[str] = []
    compile_tiny(model, tmp_path / "a", "uniform", 4, data=str(texts), popularity=use, talk=Talk(notes.append))
    found, calibrated = (open_bundle(path).tables().popularity for path in (tmp_path / "a", plain))
    share = calibrated[0, 3] / calibrated[0].sum()
    assert 0 < share < 1 and found[0, 3] / found[0].sum() == pytest.approx(share, abs=1e-3)
    assert found[0, 2] == 0 and found[0, 0] == found[0, 1]
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


def test_a_forecast_reads_the_file(model: Path, texts: Path, plain: Path, tmp_path: Path) -> None:
    use = popularity_file(tmp_path / "use", plain, 0)
    stages = forecast(make_request(model, tmp_path / "out", "kl", 0.1, data=str(texts), popularity=use))
    assert stages and all(stage.seconds >= 0 for stage in stages)


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
