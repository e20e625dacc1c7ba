"""`--modes sweep`: cost and speed of every lossy mode of a bundle, in one table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from moec.manifests.errors import OptionError
from moec.runtime.options.lossy import (
    MODE_OPTIONS,
    DynamicPrecision,
    LossyModes,
    parse_mode_list,
    parse_modes,
    setting_text,
)

from ..options.runtime_options import DEFAULT_CACHE, with_missing_experts
from ..terminal import output
from ..terminal.help_sections import SectionOption
from ..terminal.progress_bar import ProgressBar
from ..terminal.run_statistics import decisions_text
from .mode_costs import loss_text

if TYPE_CHECKING:
    import numpy as np

    from moec.compiler.request.ports import ModesWork, UnpublishedBundle
    from moec.evaluation.results import EvaluationResult
    from moec.evaluation.tasks import Item, Task
    from moec.manifests.bundle import BundleManifest
    from moec.manifests.model import ModelSpec
    from moec.runtime.engine.engine import Engine
    from moec.runtime.options.runtime import RuntimeOptions

    from ..measuring.text_engines import BundleEngine

F = TypeVar("F", bound=Callable[..., Any])
EXACT = "exact"
DYNAMIC = "dynamic-precision"
"""Value of `--modes` for the settings of a sweep that have dynamic precision alone. It has no thresholds of its own.

A compile with low versions measures these settings if `--modes` is not given.
"""
KL_TOKENS = 512
"""Tokens of one answer. A certificate scores as many, and plans its memory for them."""
KL_LOGITS = 1 << 26
"""Logits of the exact run that are kept for comparison, 256 MiB."""
KL_ITEMS = 100
TTFT_ITEMS = 20
_THRESHOLDS = (0.6, 0.75, 0.9, 0.95)
"""Thresholds without calibration. With it: deciles 2, 5, 8 and 9 of the experts' unimportance."""
_BIG_LITTLE = ("gamma=0.9", "gamma=0.7", "gamma=0.5")
_CACHE_ROUTING = ("margin=0.2", "margin=0.5", "drop=0.1", "drop=0.25", "margin=0.2,drop=0.1")

mode_sweep_option = click.option(
    "--modes",
    cls=SectionOption,
    section="Lossy modes",
    metavar=f"sweep|{DYNAMIC}|SETTING;...",
    help="Measure or predict all lossy modes, one of them, or these settings, against the exact run.",
)


def settings_of(
    text: str, manifest: BundleManifest, deciles: Sequence[float] = (), options: RuntimeOptions | None = None
) -> list[dict[str, str]]:
    """Return the options of every setting in `--modes`, the exact one first. See `allowed_settings`."""
    return allowed_settings(text, manifest.model, bool(manifest.low_experts), deciles, options)


def allowed_settings(
    text: str, model: ModelSpec, has_low: bool, deciles: Sequence[float], options: RuntimeOptions | None
) -> list[dict[str, str]]:
    """Return the options of every setting in `--modes`, the exact one first.

    text: `sweep`, DYNAMIC, or a list of settings.
    has_low: whether the bundle has low versions.
    deciles: deciles of the experts' unimportance in calibration, for the thresholds of a sweep. May be empty.
    options: the other options of the run.
    A sweep leaves out settings that the model or the options do not allow.
    Raises OptionError for such a setting in a list, or if none is left.
    """
    from moec.runtime.modes.decoder import check_modes
    from moec.runtime.options.runtime import RuntimeOptions

    is_sweep, refusal = text in ("sweep", DYNAMIC), None
    allowed: list[dict[str, str]] = [{}]
    chosen = _all_settings(has_low, deciles) if is_sweep else parse_mode_list(text)
    if text == DYNAMIC:
        chosen = [setting for setting in chosen if set(setting) == {"dynamic_precision"}]
    for setting in chosen:
        try:
            check_modes(modes_of(setting), model, int(has_low))
            replace(options or RuntimeOptions(), lossy=setting_text(setting))
        except OptionError as error:
            if not is_sweep:
                raise
            refusal = refusal or error
            continue
        allowed.append(setting)
    if len(allowed) == 1 and refusal is not None:
        raise refusal
    return allowed


def _all_settings(has_low: bool, deciles: Sequence[float]) -> list[dict[str, str]]:
    low, middle, high, highest = (deciles[1], deciles[4], deciles[7], deciles[8]) if deciles else _THRESHOLDS
    dynamic = [(0.0, 1.0), (low, 1.0), (middle, 1.0), (high, 1.0), (middle, high)] if has_low else []
    texts = dict.fromkeys(thresholds_text(*both) for both in (*dynamic, (high, high), (highest, highest)))
    settings = [{"dynamic_precision": text} for text in texts]
    settings += [{"big_little": text} for text in _BIG_LITTLE]
    settings += [{"cache_routing": text} for text in _CACHE_ROUTING]
    dynamic_precision = {"dynamic_precision": thresholds_text(middle, 1.0)}
    little, routing = {"big_little": "gamma=0.7"}, {"cache_routing": "margin=0.2"}
    both = little | routing
    if has_low:
        settings += [dynamic_precision | little, dynamic_precision | routing]
    return [*settings, both, *([dynamic_precision | both] if has_low else [])]


def thresholds_text(low_above: float, skip_above: float) -> str:
    """Return `T1,T2` with three digits, as `dynamic-precision` takes it."""
    return DynamicPrecision(round(low_above, 3), round(skip_above, 3)).to_text()


def modes_of(options: dict[str, str]) -> LossyModes:
    """Return the modes of some options. Modes that are not named are off."""
    return parse_modes(*(options.get(name) for name in MODE_OPTIONS))


def sweep_options(options: RuntimeOptions) -> RuntimeOptions:
    """Return the options of a sweep: one sequence, no modes, and DEFAULT_CACHE if no cache is given.

    Raises OptionError if a mode is given.
    """
    if not options.modes.is_exact:
        raise OptionError("`--modes` sets the modes itself", "leave out `--lossy`")
    return replace(with_missing_experts(options), slots=1)


@dataclass(slots=True)
class QualitySweep:
    """Measurement of every setting on one task, relative to the exact run of the same bundle."""

    path: Path
    options: RuntimeOptions
    kernels: str | None
    task: Task
    items: Sequence[Item]
    shots: Sequence[Item]

    def fitted(self, policy: str) -> QualitySweep:
        """Return the sweep on the items that fit the context. policy: see `evaluation/long_items.py`."""
        with self._opened({}, is_partial=False) as engine:
            fitting = engine.fit_items(self.task, self.items, self.shots, policy)
            for sentence in fitting.changes(engine.engine.memory.context):
                output.say(sentence)
        return replace(self, items=fitting.items)

    def run(
        self,
        settings: Sequence[dict[str, str]],
        is_partial: bool = False,
        keep: Callable[[dict[str, Any]], object] = lambda record: None,
    ) -> dict[str, Any]:
        """Return the record of a sweep.

        is_partial: the bundle is not published yet.
        keep: called with the record so far after every setting, because each may take minutes.
        """
        from moec.evaluation.run import compare, evaluate

        rows: list[dict[str, Any]] = []
        record = {
            "task": self.task.name,
            "metric": self.task.metric,
            "n": len(self.items),
            "expert_cache": self.options.expert_cache or f"--memory {self.options.memory}",
            "cache_state": self.options.cache_state,
            "rows": rows,
        }
        log_p: list[np.ndarray] = []
        exact: EvaluationResult | None = None
        for number, setting in enumerate(settings, 1):
            mode, guesses = modes_of(setting).to_text(), [None] * len(self.items)
            title = f"{number} of {len(settings)}, {mode or EXACT}"
            with self._opened(setting, is_partial) as engine:
                output.say(engine.engine.mode)
                with ProgressBar(title) as progress:
                    result = evaluate(
                        self.task, self.items, engine, shots=self.shots, drafts=guesses, progress=progress
                    )
                stats, counts = engine.engine.cache.stats, engine.engine.mode_counts
                row = {
                    "mode": mode,
                    "options": dict(setting),
                    "tokens_per_s": result.tokens_per_s,
                    "hit_rate": stats.hit_rate,
                    # Per new token, prompts included.
                    "bytes_read_per_token": stats.bytes_read / max(float(result.tokens.sum()), 1),
                    "decisions": None if counts is None else counts.to_plain(),
                    "ttft_ns": self._first_token_ns(engine),
                }
            exact = exact or result
            # A model that solves no item has no relative loss.
            loss = compare(self.task, exact, result).to_json() if exact.value > 0 else None
            row |= {"value": result.value, "loss": loss}
            with self._opened(setting, is_partial) as engine:
                row["kl"] = self._divergence(engine, log_p, f"KL, {title}")
            rows.append(row)
            keep(record)
        return record

    @contextmanager
    def _opened(self, setting: dict[str, str], is_partial: bool) -> Iterator[BundleEngine]:
        from moec.runtime import kernels
        from moec.runtime.bundle.open_bundle import open_bundle
        from moec.runtime.engine.engine import Engine

        from ..measuring.text_engines import BundleEngine

        if self.kernels is not None:
            kernels.select(self.kernels)
        bundle = open_bundle(self.path, allow_partial=is_partial)
        with Engine(bundle, replace(self.options, lossy=setting_text(setting))) as engine:
            engine.cache.finish_warming()
            yield BundleEngine(engine, decodes=True)

    def _first_token_ns(self, engine: BundleEngine) -> int | None:
        """Return the median time to the first token over TTFT_ITEMS prompts, or None for an empty prompt.

        The cache holds experts of the previous prompts.
        """
        runtime, times = engine.engine, list[int]()
        for item in self.items[:TTFT_ITEMS]:
            tokens = runtime.encode(self.task.prompt(item, self.shots))[: runtime.memory.context - 1]
            if not tokens:
                return None
            started_ns = time.perf_counter_ns()
            runtime.begin_sequence()
            (known,) = runtime.begin_texts([0], [tokens])
            runtime.model.logits(runtime.prefill(known)[-1:])
            times.append(time.perf_counter_ns() - started_ns)
        return round(statistics.median(times))

    def _divergence(self, engine: BundleEngine, log_p: list[np.ndarray], title: str) -> dict[str, object]:
        """Return the divergence from the first run.

        log_p: log probabilities of the first run. Empty during the first run, which fills it.
        """
        import numpy as np

        from moec.evaluation.statistics import log_softmax, summarise_divergence

        texts = [(self.task.prompt(item, self.shots), self.task.answer(item)) for item in self.items[:KL_ITEMS]]
        pairs = [(prompt, answer[:KL_TOKENS]) for prompt, answer in engine.encode_pairs(texts)]
        vocabulary = engine.engine.bundle.manifest.model.vocab_size
        room = np.cumsum([(len(answer) + 1) * vocabulary for _, answer in pairs])
        pairs = pairs[: max(1, int((room <= KL_LOGITS).sum()))]
        with ProgressBar(title) as progress:
            logits = []
            for done, pair in enumerate(pairs, 1):
                logits += engine.forced_logits([pair])
                progress(done, len(pairs))
        if not log_p:
            log_p += [log_softmax(rows) for rows in logits]
        return summarise_divergence(log_p, logits).to_json()


def quality_page(record: dict[str, Any]) -> str:
    """Return the table of a sweep as text."""
    from moec.runtime.modes.mode_counts import FLAT_SHARE

    rows = [
        [
            row["mode"] or EXACT,
            f"{row['value']:.4f}",
            "-" if not row["mode"] or row["loss"] is None else loss_text(row["loss"]),
            f"{row['kl']['mean']:.4f}",
            output.human_share(row["kl"]["agreement"]),
            f"{row['tokens_per_s']:.1f}",
            output.human_ms(row["ttft_ns"]),
            output.human_share(row["hit_rate"]),
            output.human_bytes(row["bytes_read_per_token"]),
            decisions_text(row["decisions"]),
        ]
        for row in record["rows"]
    ]
    timed = ("tokens/s", "TTFT", "hits", "read/token", "decisions")
    header = ("mode", record["metric"], "loss (95 %)", "KL", "agree", *timed)
    head = f"{record['task']}, {record['n']} items, cache {record['expert_cache']}, {record['cache_state']} start"
    shares = [row["decisions"]["lower_half_share"] for row in record["rows"] if row["decisions"] is not None]
    lower = next((share for share in shares if share is not None), None)
    if lower is not None:
        warning = ", which is flat: modes that touch it cost more" if lower > FLAT_SHARE else ""
        head += f"; the lower-ranked half of a token's experts has {lower:.0%} of the weight{warning}"
    return f"{head}; losses against the exact run of the same bundle\n\n{output.table(rows, header)}"


def say_decisions(engine: Engine) -> None:
    """Print the decisions of lossy modes on stderr. Print nothing if all are off."""
    if engine.mode_counts is not None:
        output.say(f"decisions: {decisions_text(engine.mode_counts.to_plain())}")


def speed_sweep(
    path: Path, modes: str, options: RuntimeOptions, kernels: str | None, sequence: list[int], prompt_tokens: int
) -> list[dict[str, Any]]:
    """Time every setting on the same forced tokens, each in a new engine. Compare its logits with the exact ones."""
    from moec.evaluation.statistics import log_softmax, summarise_divergence
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.tuning.mode_records import calibrated_deciles, measured_rows

    from ..measuring.decode_speed import measure_decode
    from ..options.opening import bundle_folder, open_engine

    folder = bundle_folder(path)
    settings = settings_of(modes, open_bundle(folder).manifest, calibrated_deciles(folder), options)
    # Results of `moec eval --modes`, with their conditions.
    names = ("task", "n", "expert_cache", "cache_state", "value", "loss")
    measured = {row["mode"]: {name: row.get(name) for name in names} for row in measured_rows(folder)}
    rows: list[dict[str, Any]] = []
    log_p: list[np.ndarray] = []
    for number, setting in enumerate(settings, 1):
        mode = modes_of(setting).to_text()
        output.say(f"{number} of {len(settings)}, {mode or EXACT}")
        logits: list[np.ndarray] = []
        with open_engine(path, replace(options, lossy=setting_text(setting)), kernels) as engine:
            output.say(engine.mode)
            engine.check_tokens(sequence, room=0)
            engine.cache.finish_warming()
            statistics = measure_decode(engine, sequence, prompt_tokens, logits)
            counts = engine.mode_counts
        decoded = logits[1:]  # the first is the prompt's
        log_p = log_p or [log_softmax(row) for row in decoded]
        rows.append({
            "mode": mode,
            "options": dict(setting),
            "tokens_per_s": statistics.tokens_per_s,
            "ttft_ns": statistics.ttft_ns,
            "hit_rate": statistics.hit_rate,
            "bytes_read_per_token": statistics.decode_bytes_read_per_token,
            "kl": summarise_divergence(log_p, decoded).to_json(),
            "decisions": None if counts is None else counts.to_plain(),
            "quality": measured.get(mode),
        })  # fmt: skip
    return rows


def speed_page(rows: list[dict[str, Any]], options: RuntimeOptions) -> str:
    """Return the table of a timed sweep as text."""
    lines = [
        (
            row["mode"] or EXACT,
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s'] / rows[0]['tokens_per_s']:.2f}",
            output.human_ms(row["ttft_ns"]),
            output.human_share(row["hit_rate"]),
            output.human_bytes(row["bytes_read_per_token"]),
            f"{row['kl']['mean']:.4f}",
            output.human_share(row["kl"]["agreement"]),
            "-" if row["quality"] is None else f"{loss_text(row['quality']['loss'])} of {row['quality']['task']}",
            decisions_text(row["decisions"]),
        )
        for row in rows
    ]
    header = ("mode", "tokens/s", "x exact", "TTFT", "hits", "read/token", "KL", "agree", "loss", "decisions")
    cache = options.expert_cache or f"--memory {options.memory}"
    return f"forced tokens, cache {cache}, {options.cache_state} start\n\n{output.table(lines, header)}"


@dataclass(frozen=True, slots=True)
class ModesMeasurement:
    """Measurement of `moec compile --modes`, for `CompileRequest.measure_modes`.

    Experts have a cache of DEFAULT_CACHE, or of what one token needs in a layer if that is more. If the memory of the
    compile is too small for that, they have the rest of it.

    modes: value of `--modes`.
    is_asked: whether the command line asks for it. Otherwise modes that cannot be measured are left out.
    """

    modes: str
    is_asked: bool = True

    def check(self, model: ModelSpec, has_low_versions: bool) -> None:
        """Raise OptionError for modes that cannot be measured."""
        if not self.is_asked:
            return
        for setting in allowed_settings(self.modes, model, has_low_versions, (), None):
            if "expert_activations" in setting:
                raise OptionError(
                    "a compile does not measure `expert-activations`, because few processors have it",
                    'measure it afterwards: `moec eval --modes "expert-activations bfloat16"`',
                )

    def work(self, model: ModelSpec, has_low_versions: bool) -> ModesWork:
        """Return what the measurement does at most: the thresholds of HOBBIT's shares are added to low versions."""
        from moec.compiler.request.ports import ModesWork

        try:
            settings = len(allowed_settings(self.modes, model, has_low_versions, (), None)) + has_low_versions
        except OptionError:
            if self.is_asked:
                raise
            settings = 0
        cached_share = float(DEFAULT_CACHE.rstrip("%")) / 100
        return ModesWork(settings, KL_ITEMS, KL_TOKENS, KL_LOGITS, TTFT_ITEMS, cached_share)

    def __call__(self, bundle: UnpublishedBundle) -> dict[str, Any]:
        """Return the record for quality.json. Raises MemoryBudgetExceeded."""
        from moec.compiler.walker.memory import COMPILE_PROCESS_BYTES
        from moec.manifests.sizes import option_bytes
        from moec.runtime.bundle.open_bundle import open_bundle
        from moec.runtime.memory.budget import plan_memory
        from moec.runtime.options.runtime import RuntimeOptions, parse_cache

        manifest = open_bundle(bundle.path, allow_partial=True).manifest
        published = thresholds_text(*bundle.hobbit_thresholds) if bundle.hobbit_thresholds else ""
        try:
            settings = settings_of(self.modes, manifest, bundle.deciles)
        except OptionError:
            if self.is_asked:
                raise
            return {}
        if published and manifest.low_experts and {"dynamic_precision": published} not in settings:
            settings.append({"dynamic_precision": published})
        cost = manifest.cost
        has_room = parse_cache(DEFAULT_CACHE, cost.expert_padded_bytes) >= cost.minimum_expert_bytes
        cache = DEFAULT_CACHE if has_room else option_bytes(cost.minimum_expert_bytes)
        options = RuntimeOptions(expert_cache=cache)
        if bundle.memory_bytes:
            # Computed from shapes, not from the memory of this process: equal compiles must give equal bytes.
            plan = plan_memory(manifest, options)
            need = COMPILE_PROCESS_BYTES + plan.dense_bytes + plan.kv_bytes + plan.scratch_bytes + plan.cache_bytes
            options = RuntimeOptions(memory=str(bundle.memory_bytes)) if need > bundle.memory_bytes else options
        sweep = QualitySweep(bundle.path, options, None, bundle.task, bundle.items, bundle.shots)
        # Values that differ between runs are left out: equal compiles must give equal bytes.
        varying = ("tokens_per_s", "ttft_ns", "hit_rate", "bytes_read_per_token")
        record = sweep.run(settings, is_partial=True)
        rows = [{name: value for name, value in row.items() if name not in varying} for row in record["rows"]]
        record |= {"rows": rows}
        return {**record, "published": published} if published and manifest.low_experts else record
