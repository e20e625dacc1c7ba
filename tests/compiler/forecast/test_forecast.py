"""The forecast of a compile: counts from shapes and texts, compared with the compile."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from moec.cli.lossy_modes.mode_sweep import ModesMeasurement
from moec.compiler.checkpoint.tokenizer import load_tokenizer
from moec.compiler.forecast import StageForecast, forecast
from moec.compiler.forecast.after_writing import stages_after_writing
from moec.compiler.forecast.answers import answer_slots, answering_bytes, count_answers
from moec.compiler.forecast.rates import DiskRates, LayerRates, measure_layer
from moec.compiler.forecast.stages import SearchForecast
from moec.compiler.pipeline import compile_checkpoint
from moec.compiler.preflight.preparation import prepare
from moec.compiler.preflight.prepared import Prepared, runtime_bytes
from moec.compiler.request.options import Talk
from moec.compiler.stages.encode_texts import encode_all_texts
from moec.compiler.walker.memory import SMALL_TEXTS, resident_bytes, variant_count
from moec.compiler.workspace.journal import Journal
from moec.evaluation.text_pairs import encode_pairs
from moec.manifests.errors import MoecError, OptionError
from moec.manifests.runtime_limits import MOST_ANSWER_SLOTS
from moec.profiles.weight_counts import active_weights, all_weights
from tests.tiny_compile import compile_tiny, contents, make_request, names, save_dialogues, save_model, save_texts
from tests.tiny_switch import save_tiny_switch

SEARCHED: dict[str, Any] = {"tasks": ("perplexity",), "bits": (2, 3, 4), "group_sizes": (32,), "dense_bits": 8}
NOTHING = LayerRates(0, *[0.0] * (len(fields(LayerRates)) - 1))
NO_DISK = DiskRates(0.0, 0.0)


SWEEP, MEASURING = "calibrating and quantizing", "measuring plans by their KL"


def named(stages: list[StageForecast]) -> dict[str, StageForecast]:
    return {stage.title: stage for stage in stages}


def seconds(tmp_path: Path, kind: Any = "kl", value: float = 0.05, **rates: float) -> dict[str, float]:
    """Return the seconds of each stage if only the named parts take time."""
    texts = tmp_path / "texts" if (tmp_path / "texts").is_dir() else save_texts(tmp_path / "texts")
    model = tmp_path / "model"
    if not model.is_dir():
        save_model(model, layers=3, experts=4)
    prepared = prepare(make_request(model, tmp_path / "out", kind, value, quick=False, data=str(texts), **SEARCHED))
    found = SearchForecast(prepared, encode_all_texts(prepared), NO_DISK, replace(NOTHING, **rates))
    return {stage.title: stage.seconds for stage in found.stages()}


def test_pieces_are_counted(one_layer: None, tmp_path: Path) -> None:
    held_out = "KL on perplexity"
    quantized = seconds(tmp_path, expert=1.0)
    assert quantized[SWEEP] == 3 * 4 and quantized[MEASURING] == 0
    loaded = seconds(tmp_path, loaded_layer=1.0)
    assert loaded[SWEEP] == pytest.approx(3) and loaded[MEASURING] == pytest.approx(8 * 3), "at most 8 plans for a KL"
    assert seconds(tmp_path, "bits_per_weight", 4.0, loaded_layer=1.0)[MEASURING] == pytest.approx(3)
    restored = seconds(tmp_path, restored_expert=1.0)
    assert restored[MEASURING] == 8 * 12
    calibrated = seconds(tmp_path, calibration_token=1.0)[SWEEP]
    options: dict[str, Any] = {"quick": False, "data": str(tmp_path / "texts"), **SEARCHED}
    texts = encode_all_texts(prepare(make_request(tmp_path / "model", tmp_path / "out", "kl", 0.05, **options)))
    assert calibrated == pytest.approx(3 * sum(map(len, texts.calibration.rows)))
    passing, answering = seconds(tmp_path, token=1.0), seconds(tmp_path, tried_token=1.0)
    assert answering[held_out] == pytest.approx(3 * sum(map(len, texts.held_out["perplexity"].texts.rows)))
    assert passing[MEASURING] == pytest.approx(8 * 3 * sum(map(len, texts.validation.texts.rows)))
    for_a_loss = seconds(tmp_path, "loss", 0.05, tried_token=1.0, read_token=100.0)
    assert for_a_loss[held_out] == answering[held_out] and "measuring the tasks" not in answering
    # Checkpoint and 4 plans on validation items, checkpoint and bundle on 0.7 of the test items. Texts are only scored.
    lines = {name: (tmp_path / "texts" / f"{name}.jsonl").read_text().splitlines() for name in ("validation", "test")}
    tokens = {name: sum(len(json.loads(line)["text"]) for line in own) for name, own in lines.items()}
    expected = 3 * (104 * tokens["validation"] + 0.7 * 101 * tokens["test"])
    assert for_a_loss["measuring the tasks"] == pytest.approx(expected, rel=0.05)
    assert seconds(tmp_path, "loss", 0.05, decoded_token=1.0)["measuring the tasks"] == 0


@pytest.fixture
def journal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the journal of `out` has each time that it is removed."""
    sizes, remove = list[int](), Journal.remove

    def removed(journal: Journal, last: str | None = None) -> None:
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "out.work").iterdir()))
        remove(journal, last)

    monkeypatch.setattr(Journal, "remove", removed)
    return sizes


def test_disk_and_stages_are_those_of_the_compile(one_layer: None, tmp_path: Path, journal_bytes: list[int]) -> None:
    model, texts = save_model(tmp_path / "model", layers=3, experts=4), save_texts(tmp_path / "texts")
    titles = list[str]()
    talk = Talk(progress=lambda title: lambda done, total: titles.append(title))
    options = {"data": str(texts), "quick": False, **SEARCHED}
    foreseen = named(forecast(make_request(model, tmp_path / "out", "bits_per_weight", 4.0, **options)))
    compile_checkpoint(make_request(model, tmp_path / "out", "bits_per_weight", 4.0, talk=talk, **options))
    work = foreseen[SWEEP].disk_bytes
    assert 0.5 * work < journal_bytes[-1] <= work, "the journal, its second set of residual streams apart"
    files = [path for path in (tmp_path / "out").glob("*.safetensors") if not path.name.startswith("tables")]
    written = sum(path.stat().st_size for path in files)
    assert written <= foreseen["writing the bundle"].disk_bytes - work < 1.5 * written
    assert {*foreseen} - {"hashing the checkpoint"} <= {*titles}
    assert all(stage.memory_bytes > 0 for stage in foreseen.values())


@pytest.mark.parametrize("has_encoder", [False, True])
def test_every_piece_of_a_layer_takes_time(tmp_path: Path, has_encoder: bool) -> None:
    if has_encoder:
        model, data = save_tiny_switch(tmp_path / "model"), save_dialogues(tmp_path / "texts")
    else:
        model, data = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    options = {**SEARCHED, "tasks": ("samsum",) if has_encoder else SEARCHED["tasks"], "data": str(data)}
    prepared = prepare(make_request(model, tmp_path / "out", "kl", 0.05, quick=False, **options))
    texts, told = encode_all_texts(prepared), list[tuple[int, int]]()
    rates = measure_layer(
        prepared.lowering,
        texts.calibration,
        prepared.stored_specs,
        "gptq",
        answer_slots(prepared),
        lambda done, total: told.append((done, total)),
    )
    times = [getattr(rates, field.name) for field in fields(rates) if field.name != "layer"]
    assert min(times) > 0
    assert told[0][0] == 0 and told[-1][0] == told[-1][1]


def test_a_model_that_memory_holds_is_foreseen_as_well(tmp_path: Path, journal_bytes: list[int]) -> None:
    """With more stages: swaps, comparisons, and generated answers in the certificate."""
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    titles = list[str]()
    talk = Talk(lambda sentence: None, lambda title: lambda done, total: titles.append(title))
    request = make_request(model, tmp_path / "out", "loss", 0.5, quick=False, data=str(texts), talk=talk, **SEARCHED)
    found = named(forecast(request))
    assert {SWEEP, "predicting what each unit costs", MEASURING, "KL on perplexity"} < {*found}
    assert {"swapping formats at equal bytes", "comparing with uniform formats and EdgeMoE"} < {*found}
    assert found["measuring the tasks"].seconds > 0
    assert (names(tmp_path)) == {"model", "texts"}, "nothing stays"
    compile_checkpoint(request)
    predicted = found["predicting what each unit costs"].disk_bytes
    assert 0.3 * predicted < journal_bytes[-1] <= predicted
    assert {SWEEP, "predicting what each unit costs", MEASURING, "KL on perplexity"} < {*titles}


@pytest.mark.parametrize("bits", [4, 16])
def test_one_format_for_all(tmp_path: Path, bits: int) -> None:
    model = save_model(tmp_path / "model", layers=2, experts=3)
    before = contents(tmp_path)
    (digests, writing) = forecast(make_request(model, tmp_path / "out", "uniform", bits))
    assert digests.work.startswith(f"{sum(p.stat().st_size for p in model.glob('*.safetensors')):,} ")
    assert contents(tmp_path) == before
    compile_tiny(model, tmp_path / "out", "uniform", bits)
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert written <= writing.disk_bytes < 1.3 * written


def test_what_cannot_be_foreseen_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", layers=2, experts=3)
    with pytest.raises(OptionError, match="a forecast of a search counts the texts"):
        forecast(make_request(model, tmp_path / "out", "bits_per_weight", 4.0, bits=(2, 3, 4), group_sizes=(32,)))
    with pytest.raises(MoecError, match="cannot be written"):
        forecast(make_request(model, Path("/proc/none/out"), "uniform", 4))
    assert forecast(make_request(model, tmp_path / "none" / "out", "uniform", 4)), "the compile makes the folder"
    assert names(tmp_path) == {"model"}


def test_generated_answers_are_as_long_as_the_datas(tmp_path: Path) -> None:
    example = Path("examples")
    options: dict[str, Any] = {"data": str(example / "data" / "gsm8k"), "tasks": ("gsm8k",), "group_sizes": (64,)}
    options |= {"limit": 300, "comparisons": True}
    prepared = prepare(make_request(example / "model", tmp_path / "out", "loss", 0.02, quick=False, **options))
    validation, test = count_answers(prepared)
    (split,) = prepared.splits
    tokenizer = load_tokenizer(prepared.checkpoint.root)
    for found, items in ((validation, split.validation.items), (test, split.test.items)):
        pairs = encode_pairs(tokenizer, [(split.task.prompt(item), split.task.answer(item)) for item in items])
        assert found.decoded == pytest.approx(sum(len(answer) for _, answer in pairs), rel=0.1)
        assert found.read == pytest.approx(sum(len(prompt) + len(answer) for prompt, answer in pairs), rel=0.1)
    texts, layers = encode_all_texts(prepared), prepared.lowering.model.num_layers
    stages = SearchForecast(prepared, texts, NO_DISK, replace(NOTHING, decoded_token=1.0)).stages()
    expected = layers * (validation.decoded + test.decoded)
    assert named(stages)["measuring the tasks"].seconds == pytest.approx(expected, rel=1e-6)
    dear = replace(prepared, kept_layers=replace(prepared.kept_layers, texts=SMALL_TEXTS))
    stages = SearchForecast(dear, texts, NO_DISK, replace(NOTHING, decoded_token=1.0)).stages()
    expected = layers * (validation.decoded + 0.7 * test.decoded)
    assert named(stages)["measuring the tasks"].seconds == pytest.approx(expected, rel=1e-6), "it may end early"
    # At one token per second and layer: the KL measurements on 256 answers, and those of a comparison.
    stages = SearchForecast(prepared, texts, NO_DISK, replace(NOTHING, token=1.0, tried_token=1.0)).stages()
    assert validation.answered == validation.read, "one answer for each"
    answers = texts.validation.texts.num_tokens
    assert answers == pytest.approx(validation.answered * 256 / len(split.validation.items), rel=0.1)
    found, one = named(stages), layers * answers
    assert found[MEASURING].seconds == pytest.approx(12 * one), "those of a usual search"
    assert found["swapping formats at equal bytes"].seconds == pytest.approx(25 * one)
    # Each group of dense weights and the experts of each layer make a variant, which passes the layers after it.
    variants, probe = variant_count(prepared.lowering.model), texts.probe.num_tokens
    swept = layers * (texts.scored_tokens + probe) + variants * probe * (layers + 1) / 2
    assert found[SWEEP].seconds == pytest.approx(swept)
    formats, experts = len([spec for spec in prepared.specs if spec.bitwidth < 16]), 48
    divergences = (formats + 2 * (3 + 6) + 2 * (1 + experts) * 64 / 256) * one
    answered = (formats.bit_length() + 2 * (3 + 6)) * layers * validation.read
    compared = found["comparing with uniform formats and EdgeMoE"].seconds
    assert compared == pytest.approx(divergences + answered)


def test_bundles_that_answer_from_disk_are_read_once_a_pass(one_layer: None, tmp_path: Path) -> None:
    """The memory holds no part of either bundle: 2 bytes per weight of the checkpoint's, 4 bits of a plan's."""
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    prepared = prepare(make_request(model, tmp_path / "out", "loss", 0.05, quick=False, data=str(texts), **SEARCHED))
    disk, answers = replace(NO_DISK, digested_byte=1.0), encode_all_texts(prepared)
    foreseen = SearchForecast(prepared, answers, disk, NOTHING)
    assert named(foreseen.stages())["measuring the tasks"].seconds == 0, "both fit"
    prepared = replace(prepared, request=replace(prepared.request, memory_bytes=1))
    foreseen = SearchForecast(prepared, answers, disk, NOTHING)
    validation, test = count_answers(prepared)
    passes = (validation.read + test.read) / 1024, (4 * validation.read + test.read) / 1024
    spec = prepared.lowering.model
    units = sum(prod(spec.unit_shape(unit.layer, unit.projection)) for unit in spec.unit_keys())
    weights, room = units + sum(map(prod, spec.dense_shapes().values())), runtime_bytes(spec, 1)
    expected = passes[0] * (2 * weights - room) + passes[1] * (weights // 2 - room)
    assert room < 0 and named(foreseen.stages())["measuring the tasks"].seconds == pytest.approx(expected)


def test_of_several_choices_only_the_right_one_tells_a_kl(tmp_path: Path) -> None:
    rows = [{"question": "Which?", "choices": ["one", "two", "three", "four"], "answer": 2, "subject": "x"}]
    texts = tmp_path / "mmlu"
    texts.mkdir()
    for name, count in (("train", 3), ("validation", 4), ("test", 5)):
        lines = [json.dumps({**rows[0], "question": f"Which of {name} {at}?"}) for at in range(count)]
        (texts / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    model = save_model(tmp_path / "model", layers=2, experts=3)
    options = {**SEARCHED, "tasks": ("mmlu",), "data": str(texts)}
    prepared = prepare(make_request(model, tmp_path / "out", "loss", 0.05, quick=False, **options))
    validation, test = count_answers(prepared)
    assert validation.decoded == test.decoded == 0
    assert validation.read == pytest.approx(4 * validation.answered, rel=0.01) and test.answered > validation.answered


LEARNING, MODES = "learning to look ahead", "measuring lossy modes"
TEXTS = {"train": 10, "validation": 3, "test": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 3 layers with 4 experts each, and texts of one token per letter."""
    root = tmp_path_factory.mktemp("after")
    save_model(root / "model", layers=3, experts=4)
    save_texts(root / "texts", **TEXTS)
    return root


def prepared(folder: Path, **values: Any) -> Prepared:
    return prepare(make_request(folder / "model", folder / "out", "uniform", 8, data=str(folder / "texts"), **values))


def foreseen(prepared: Prepared, disk: DiskRates = NO_DISK, **rates: float) -> dict[str, StageForecast]:
    """Return the stages if only the named parts take time."""
    found = stages_after_writing(prepared, disk, replace(NOTHING, **rates), 1000, 5, prepared.request.measure_modes)
    return {stage.title: stage for stage in found}


def letters(folder: Path, name: str) -> int:
    text = (folder / "texts" / f"{name}.jsonl").read_text()
    return len(text) - len('{"text": ""}\n') * text.count("\n")


def test_learned_routers_are_counted(folder: Path) -> None:
    found = prepared(folder)
    width, tokens = found.lowering.model.hidden_size + 1, letters(folder, "train")
    (passes,) = foreseen(found, token=1.0).values()
    assert passes.title == LEARNING and passes.seconds == pytest.approx(3 * tokens, rel=0.05)
    assert passes.work.endswith(" tokens once, at most 3 maps") and passes.disk_bytes == 5 and passes.memory_bytes > 0
    # Three penalties: a factor each, and targets and solutions of three maps to 4 experts.
    expected = 3 * (0.8 * tokens * width**2 + width**3 / 2) + 3 * 4 * width * 3 * (0.8 * tokens + width)
    assert foreseen(found, product=1.0)[LEARNING].seconds == pytest.approx(expected, rel=0.05)
    little = replace(found, request=replace(found.request, memory_bytes=1))
    assert foreseen(little, token=1.0)[LEARNING].seconds == pytest.approx(3 * passes.seconds), "layer by layer"


def test_what_learns_nothing_has_no_stage(folder: Path, tmp_path: Path) -> None:
    few = save_texts(tmp_path / "few", **{**TEXTS, "train": 4})
    request = make_request(folder / "model", folder / "out", "uniform", 8, data=str(few))
    assert foreseen(prepare(request), token=1.0) == {}
    one_layer = save_model(tmp_path / "one", layers=1, experts=2)
    request = make_request(one_layer, folder / "out", "uniform", 8, data=str(folder / "texts"))
    assert foreseen(prepare(request), token=1.0) == {}


def test_lossy_modes_are_counted(folder: Path) -> None:
    measured = prepared(folder, measure_modes=ModesMeasurement("big-little gamma=0.5; cache-routing margin=0.2"))
    tokens = letters(folder, "test")
    # Each of 3 settings decodes the texts for a score, and again for a KL, with an end token. They have no prompts.
    decoded = 3 * (2 * tokens + TEXTS["test"])
    found, model = foreseen(measured, memory_byte=1.0)[MODES], measured.lowering.model
    moved = 1000 * active_weights(model) / all_weights(model)
    assert found.seconds == pytest.approx(decoded * moved, rel=0.05)
    assert found.work == "at most 3 settings on 4 items, token by token"
    disk = replace(NO_DISK, digested_byte=1.0)
    prompts, share = 3 * (4 + 4 + 4), 2 / 4  # top-2 of 4 experts; a quarter of 1,000 bytes is in the cache
    read = 750 * (prompts + share * decoded)
    assert foreseen(measured, disk)[MODES].seconds == pytest.approx(read, rel=0.05)
    longer = read + decoded * (moved - 750 * share)
    assert moved > 750 * share
    assert foreseen(measured, disk, memory_byte=1.0)[MODES].seconds == pytest.approx(longer, rel=0.05)


@pytest.mark.parametrize(("is_asked", "low"), [(False, None), (False, 2), (True, None)])
def test_thresholds_that_nobody_asked_for_are_measured_with_low_versions(
    folder: Path, tmp_path: Path, is_asked: bool, low: int | None
) -> None:
    model = prepared(folder).lowering.model
    work = ModesMeasurement("dynamic-precision", is_asked).work(model, low is not None)
    assert work.settings == (9 if low else 3)
    top_1 = save_model(tmp_path / "top-1", layers=1, experts=2, top_k=1)
    request = make_request(top_1, folder / "out", "uniform", 8, data=str(folder / "texts"))
    refused = prepare(request).lowering.model
    if is_asked:
        with pytest.raises(OptionError, match="this model has no other"):
            ModesMeasurement("dynamic-precision").work(refused, False)
    else:
        assert ModesMeasurement("dynamic-precision", is_asked=False).work(refused, low is not None).settings == 0


def test_the_stages_follow_the_others(folder: Path) -> None:
    options: dict[str, Any] = {"data": str(folder / "texts"), "fallback_bits": 2}
    asked = ModesMeasurement("dynamic-precision", is_asked=False)
    found = forecast(make_request(folder / "model", folder / "out", "uniform", 8, measure_modes=asked, **options))
    assert [stage.title for stage in found][-3:] == ["writing the bundle", LEARNING, MODES]
    assert all(stage.seconds > 0 for stage in found)


def test_answers_take_as_many_slots_as_memory_holds(folder: Path) -> None:
    """All experts stay in memory, unless few slots would be left."""
    ready = prepared(folder)
    model, split = ready.lowering.model, ready.splits[0]
    assert answer_slots(ready) == MOST_ANSWER_SLOTS
    long = replace(split, task=replace(split.task, max_new_tokens=model.default_context))
    one = model.kv_bytes_per_position * model.default_context
    weights = 2 * all_weights(model)

    def slots(room: int) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Prepared, "runtime_bytes", property(lambda _: room))
            return answer_slots(replace(ready, splits=(long,)))

    assert slots(weights + 40 * one) == 40 and slots(weights + 1000 * one) == MOST_ANSWER_SLOTS
    assert slots(weights + one) == max(1, (weights + one) // 2 // one)


def test_the_slots_of_answers_take_memory(folder: Path) -> None:
    """The checkpoint answers at 16 bits next to the layers that stay, and never beyond the limit."""
    ready = prepared(folder)
    model, split = ready.lowering.model, ready.splits[0]
    short, long = (
        replace(ready, splits=(replace(split, task=replace(split.task, max_new_tokens=tokens)),)) for tokens in (20, 30)
    )
    more = answering_bytes(long) - answering_bytes(short)
    assert more == answer_slots(ready) * 10 * model.kv_bytes_per_position
    assert answering_bytes(ready) > 2 * all_weights(model) + resident_bytes(model, ready.kept_layers.count)
    limited = replace(ready, request=replace(ready.request, memory_bytes=1 << 20))
    assert answering_bytes(limited) == limited.request.memory_limit_bytes
