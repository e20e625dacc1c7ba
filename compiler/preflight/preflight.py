"""All checks that are possible before a weight is read. One report lists every problem."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence

from moec.manifests.bundle import TOKENIZER_NAME
from moec.manifests.errors import CheckpointError, TargetUnreachable
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.tokenizer import load_tokenizer
from ..families import Lowering, TensorSource
from ..quantization.own_codes import held_units
from ..request.ports import CheckCompanions

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MAX_NAMED = 5
SENTENCEPIECE_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SAVE_TOKENIZER = "save it with transformers: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`"


def preflight(
    lowering: Lowering,
    *,
    required: Sequence[QuantSpec] = (),
    offered: Sequence[QuantSpec] = (),
    group_sizes: Sequence[int] = (),
    bits_per_weight: float | None = None,
    size_bytes: int | None = None,
    prunes: bool = False,
    check_companions: CheckCompanions | None = None,
) -> tuple[str, ...]:
    """Check files, shapes, formats and target without reading weights. Return the notes.

    required: formats that the user named for the routed experts. Each must fit all of them.
    offered: formats on offer to the search. A unit is not offered the formats that do not fit it.
    group_sizes: group sizes that the user named.
    bits_per_weight, size_bytes: the target, scales included.
    prunes: whether experts may be left out.
    check_companions: checks the files that the runtime reads, as it does.
    Raises TargetUnreachable if only formats and target prevent the compile.
    Raises CheckpointError in all other cases. Both list every problem.
    """
    checkpoint, model = lowering.checkpoint, lowering.model
    file_problems = _file_problems(checkpoint, check_companions)
    model_problems = [*_tensor_problems(checkpoint, lowering), *(error.message for error in file_problems)]
    plan_problems = [*_format_problems(model, required), *_unheld_problems(model, offered)]
    plan_problems += _group_problems(model, group_sizes)
    if not plan_problems:
        reachable = reachable_bytes(model, (*required, *offered), prunes)
        pruned = reachable_bytes(model, (*required, *offered), prunes=True)
        plan_problems += _target_problems(reachable, pruned[0], bits_per_weight, size_bytes)
    problems = (*model_problems, *plan_problems)
    if problems:
        kind = CheckpointError if model_problems else TargetUnreachable
        where = f"`{checkpoint.place}`"
        text = (
            f": {problems[0]}"
            if len(problems) == 1
            else "".join([f" has {len(problems)} problems:", *(f"\n- {problem}" for problem in problems)])
        )
        remedies = {
            (True, False): "compare the folder with the model's source",
            (False, True): "choose another target, `--bits` or `--group-size`",
        }
        remedy = remedies.get((bool(model_problems), bool(plan_problems)))
        only_file_problem = file_problems[0] if len(problems) == 1 and file_problems else None
        raise kind(where + text, (only_file_problem and only_file_problem.hint) or remedy)
    return (
        *lowering.notes,
        *_ignored_notes(checkpoint, lowering),
        *_sixteen_bit_notes(model, offered),
        *_unused_bits_notes(model, offered),
        *_own_codes_notes(lowering, required, offered),
        *_tokenizer_notes(checkpoint, model),
    )


def reachable_bytes(model: ModelSpec, offered: Iterable[QuantSpec], prunes: bool = False) -> tuple[int, int]:
    """Return least and greatest bytes of the routed experts, without padding: in the smallest formats, and at 16 bits.

    Scales are included.
    prunes: the least counts only top_k experts per layer, if the router allows pruning. The search reports experts
        that cannot be left out because calibration knows too little about them.
    """
    formats = [*offered, QuantSpec(16, float_type="bfloat16")]
    least = greatest = 0.0
    for index, layer in enumerate(model.layers):
        least_count = layer.experts.top_k if prunes and layer.experts.can_lose_experts else layer.experts.count
        for projection in layer.experts.projections:
            rows, columns = model.unit_shape(index, projection)
            sizes = [spec.row_bytes(columns) for spec in formats if spec.fits(columns)]
            least += least_count * rows * min(sizes)
            greatest += layer.experts.count * rows * columns * 2
    return round(least), round(greatest)


def _file_problems(checkpoint: Checkpoint, check: CheckCompanions | None) -> list[CheckpointError]:
    """Return problems of files that a bundle copies, and of the tokenizer."""
    problems = list[CheckpointError]()
    for name in checkpoint.companion_files():
        try:
            checkpoint.file_bytes(name)
        except CheckpointError as error:
            problems.append(error)
    if check is not None and not problems:
        problems += check(checkpoint.root)
    if any(TOKENIZER_NAME in problem.message for problem in problems):
        return problems
    if not os.path.lexists(checkpoint.root / TOKENIZER_NAME):
        pieces = [name for name in SENTENCEPIECE_NAMES if (checkpoint.root / name).is_file()]
        other = f", only a SentencePiece model `{pieces[0]}`" if pieces else ""
        message = f"no `{TOKENIZER_NAME}`{other}, expected a fast tokenizer next to the weights"
        return [*problems, CheckpointError(message, _SAVE_TOKENIZER)]
    try:
        load_tokenizer(checkpoint.root)
    except CheckpointError as error:
        problems.append(error)
    return problems


def _tokenizer_notes(checkpoint: Checkpoint, model: ModelSpec) -> list[str]:
    """Return notes on tokens without a row of the embedding, and on a token that the bundle's tokenizer adds."""
    notes, tokenizer = list[str](), load_tokenizer(checkpoint.root)
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    beyond = [text for number, text in sorted(added.items()) if number >= model.vocab_size]
    if beyond:
        named = ", ".join(f"`{text}`" for text in (*beyond[:_MAX_NAMED], *beyond[_MAX_NAMED:][-1:]))
        notes.append(
            f"`{checkpoint.root / TOKENIZER_NAME}`: {len(beyond)} added tokens have no row in the embedding of "
            f"{model.vocab_size} rows, and texts with them are refused: {named}"
        )
    if checkpoint.tokenizer_is_completed:
        notes.append("`add_bos_token` is true, and `tokenizer.json` adds no such token: that of the bundle does")
    return notes


def _tensor_problems(checkpoint: Checkpoint, lowering: Lowering) -> list[str]:
    """Return missing, misshapen and unexpected tensors. Names that differ only in a number share one text."""
    sources: dict[str, TensorSource] = {}
    for source in (*lowering.dense.values(), *lowering.units.values()):
        sources.setdefault(source.name, source)
    missing, misshapen = [], []
    for name, source in sources.items():
        ref = checkpoint.tensors.get(name)
        if ref is None:
            missing.append((name, ""))
        elif ref.shape != source.shape:
            misshapen.append((name, f"expected shape {list(source.shape)}, found {list(ref.shape)}"))
    known = {*sources, *lowering.ignored, *lowering.auxiliary}
    unexpected = [(name, "") for name in checkpoint.tensors if name not in known]
    return [
        *(f"missing tensor {text}" for text in _together(missing)),
        *(f"misshapen tensor {text}" for text in _together(misshapen)),
        *(f"unexpected tensor {text}, which this family does not have" for text in _together(unexpected)),
    ]


def _together(details: Sequence[tuple[str, str]]) -> list[str]:
    """Return one text for all names that differ only in their numbers and have the same detail."""
    patterns: dict[tuple[str, str], list[str]] = {}
    for name, detail in sorted(details):
        patterns.setdefault((_NUMBER.sub("*", name), detail), []).append(name)
    texts = []
    for (pattern, detail), names in patterns.items():
        text = f"`{names[0]}`" if len(names) == 1 else f"`{pattern}` ({len(names)} times, first `{names[0]}`)"
        texts.append(f"{text}: {detail}" if detail else text)
    return texts


def routed_widths(model: ModelSpec) -> dict[int, list[str]]:
    """Return columns of the routed projections -> projections with that width."""
    widths: dict[int, list[str]] = {}
    for index in model.expert_layers:
        for projection in model.layers[index].experts.projections:
            names = widths.setdefault(model.unit_shape(index, projection)[1], [])
            if projection not in names:
                names.append(projection)
    return widths


def _format_problems(model: ModelSpec, required: Sequence[QuantSpec]) -> list[str]:
    """Return the formats that the user named and that a routed projection does not fit."""
    problems = []
    for columns, projections in sorted(routed_widths(model).items()):
        wrong = [str(spec) for spec in required if not spec.fits(columns)]
        if wrong:
            fitting = [size for size in (256, 128, 64, 32) if columns % size == 0]
            ways = f"group sizes that do: {', '.join(map(str, fitting))}" if fitting else "only 16 bits fit"
            problems.append(
                f"{', '.join(wrong)}: the group size (at least 32) does not divide the {columns} columns of "
                f"{', '.join(projections)}; {ways}"
            )
    return problems


def _unheld_problems(model: ModelSpec, offered: Sequence[QuantSpec]) -> list[str]:
    """Return the widths that no offered format can hold."""
    return [
        f"none of the offered formats ({', '.join(map(str, offered))}) holds the {columns} columns of "
        f"{', '.join(projections)}"
        for columns, projections in sorted(routed_widths(model).items())
        if offered and not any(spec.fits(columns) for spec in offered)
    ]


def _group_problems(model: ModelSpec, group_sizes: Sequence[int]) -> list[str]:
    """Return the group sizes that no routed projection fits. Ignoring them silently would keep 16 bits."""
    widths = sorted(routed_widths(model))
    return [
        f"group size {size} divides the columns of no routed projection ({', '.join(map(str, widths))})"
        for size in group_sizes
        if size and all(columns % size for columns in widths)
    ]


def _sixteen_bit_notes(model: ModelSpec, offered: Sequence[QuantSpec]) -> list[str]:
    """Return the projections that no offered format below 16 bits can hold."""
    below = [spec for spec in offered if spec.bitwidth < 16]
    return [
        f"{', '.join(projections)} stay at 16 bits: no format below on offer holds their {columns} columns"
        for columns, projections in sorted(routed_widths(model).items())
        if below and not any(spec.fits(columns) for spec in below)
    ]


def _unused_bits_notes(model: ModelSpec, offered: Sequence[QuantSpec]) -> list[str]:
    """Return the bitwidths on offer whose formats fit no routed projection."""
    widths, notes = sorted(routed_widths(model)), []
    for bits in sorted({spec.bitwidth for spec in offered}):
        specs = [spec for spec in offered if spec.bitwidth == bits]
        if not any(spec.fits(columns) for spec in specs for columns in widths):
            notes.append(
                f"{bits:g} bits are not used: {', '.join(map(str, specs))} cannot hold rows of "
                f"{' or '.join(map(str, widths))} weights"
            )
    return notes


def _own_codes_notes(lowering: Lowering, required: Sequence[QuantSpec], offered: Sequence[QuantSpec]) -> list[str]:
    """Return notes on units whose own codes a format holds: one for each format that does, or would."""
    total, notes = len(lowering.units), []
    for spec, count in held_units(lowering).items():
        stored = f"{count} of {total} expert projections are stored with codes that `{spec}` holds"
        if spec in (*required, *offered):
            notes.append(f"{stored}; they are taken as they are")
        elif offered and all(other.bitwidth != spec.bitwidth for other in offered):
            notes.append(f"{stored}, which is not on offer: add {spec.bitwidth:g} to `--bits`")
    return notes


def _target_problems(
    reachable: tuple[int, int], pruned_bytes: int, bits_per_weight: float | None, size_bytes: int | None
) -> list[str]:
    """Return the targets outside the reachable range.

    reachable: least and greatest bytes.
    pruned_bytes: least bytes if experts are left out.
    """
    least, greatest = reachable
    weights = greatest // 2

    def remedy(wanted_bytes: float) -> str:
        can_prune = pruned_bytes <= wanted_bytes < least
        return f"; `--prune-experts` with `--data` goes down to {pruned_bytes} bytes" if can_prune else ""

    problems = []
    least_bits = math.ceil(8000 * least / weights) / 1000
    if bits_per_weight is not None and not 8 * least <= bits_per_weight * weights <= 16 * weights:
        further = remedy(bits_per_weight * weights / 8)
        problems.append(f"{bits_per_weight:g} bits per weight cannot be had, {least_bits:g} to 16 can{further}")
    if size_bytes is not None and not least <= size_bytes <= greatest:
        further = remedy(size_bytes)
        problems.append(f"{size_bytes} bytes of routed experts cannot be had, {least} to {greatest} can{further}")
    return problems


def _ignored_notes(checkpoint: Checkpoint, lowering: Lowering) -> list[str]:
    """Return a note on tensors on disk that are not used."""
    ignored = sorted(name for name in checkpoint.tensors if name in lowering.ignored)
    named = ", ".join(f"`{name}`" for name in ignored[:_MAX_NAMED])
    return [f"{len(ignored)} tensors play no part: {named}"] if ignored else []
