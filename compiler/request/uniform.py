"""Plans without a search: one format for all routed experts, or for each of them that of its own codes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from moec.manifests.errors import PlanError
from moec.manifests.model import ModelSpec, UnitKey, keeps_16_bits
from moec.manifests.quant import COLUMNS_PER_TILE, FloatType, QuantSpec

from ..families import Lowering
from ..quantization.own_codes import held_units
from ..quantization.quantizers import WITH_MOMENTS, can_make
from .options import UNIFORM_DENSE_BITS, CompileOptions
from .plan import CompilePlan


def uniform_spec(options: CompileOptions, lowering: Lowering) -> QuantSpec:
    """Return the format of all experts.

    Unless group size or symmetry is requested, a checkpoint's own codes decide. 4 bits of an mxfp4 checkpoint stay
    mxfp4. The bits of integer codes take the format that holds the most units exactly.
    """
    bits = options.target.value
    if bits == 16:
        return lowering.spec_16bit
    if not options.group_sizes and options.symmetric is None:
        if bits == 4 and lowering.own_unit_spec.is_mxfp4:
            return lowering.own_unit_spec
        widths = {lowering.model.unit_shape(unit.layer, unit.projection)[1] for unit in lowering.units}
        exact = [spec for spec in held_units(lowering) if spec.bitwidth == bits and all(map(spec.fits, widths))]
        if exact and can_make(options.quantizer, exact[0]):
            return exact[0]
    return QuantSpec(bits, options.uniform_group, options.is_uniform_symmetric)


def requested_specs(options: CompileOptions, lowering: Lowering) -> tuple[QuantSpec, ...]:
    """Return the formats of the experts of a plan without a search, the most used first. Raises CheckpointError."""
    if not options.target.keeps_codes:
        return (uniform_spec(options, lowering),)
    counts = Counter(map(partial(_own_format, lowering), lowering.units))
    return tuple(spec for spec, _ in counts.most_common())


def requested_plan(options: CompileOptions, lowering: Lowering) -> CompilePlan:
    """Return the plan without a search. Raises CheckpointError or PlanError."""
    model, dense = lowering.model, uniform_dense_spec(options, lowering)
    if not options.target.keeps_codes:
        experts = uniform_spec(options, lowering)
        return uniform_plan(model, experts, dense, lowering.float_type, uniform_quantizer(options))
    plan = uniform_plan(model, lowering.spec_16bit, dense, lowering.float_type, uniform_quantizer(options))
    units = {unit: _own_format(lowering, unit) for unit in plan.units}
    if all(spec.bitwidth == 16 for spec in units.values()):
        raise PlanError(
            f"no format below 16 bits holds an expert of `{lowering.checkpoint.name}` as it is stored",
            "take `--uniform 4`, or `--loss 2%` with `--data`",
        )
    formats = {} if options.dense_bits else _own_dense_formats(lowering)
    return replace(plan, units=units, dense={**plan.dense, **formats})


def _own_dense_formats(lowering: Lowering) -> dict[str, QuantSpec]:
    """Return the smallest format of each dense matrix that has codes and may have them in a bundle."""
    formats = dict[str, QuantSpec]()
    for name, shape in lowering.model.dense_shapes().items():
        need = None if keeps_16_bits(name, shape) else lowering.dense_code_need(name)
        least = None if need is None else need.least_format()
        if least is not None:
            formats[name] = least
    return formats


def _own_format(lowering: Lowering, unit: UnitKey) -> QuantSpec:
    """Return the smallest format that holds a unit as it is stored: its codes, MXFP4, or 16 bits.

    Other codes take 8 bits in groups of 32, or one scale per row. Raises CheckpointError.
    """
    need, source = lowering.code_need(unit), lowering.units[unit]
    least = None if need is None else need.least_format()
    if least is not None:
        return least
    if lowering.is_mxfp4(source):
        return QuantSpec.parse("mxfp4")
    if source.name not in lowering.checkpoint.packed:
        return lowering.spec_16bit
    columns = lowering.model.unit_shape(unit.layer, unit.projection)[1]
    fitting = (
        spec for spec in (QuantSpec(8, 32, symmetric=True), QuantSpec(8, 0, symmetric=True)) if spec.fits(columns)
    )
    return next(fitting, lowering.spec_16bit)


def uniform_quantizer(options: CompileOptions) -> str:
    """Return the quantizer. Without data, those that use inputs become `rtn`."""
    return "rtn" if options.quantizer in WITH_MOMENTS and options.data is None else options.quantizer


def uniform_dense_spec(options: CompileOptions, lowering: Lowering) -> QuantSpec:
    """Return the format of attention, embedding and lm_head."""
    bits = options.dense_bits or UNIFORM_DENSE_BITS
    if bits == 16:
        return lowering.spec_16bit
    is_symmetric = options.is_uniform_symmetric and options.target.value < 16
    return QuantSpec(bits, options.uniform_group, is_symmetric)


def uniform_plan(
    model: ModelSpec, experts: QuantSpec, dense: QuantSpec, float_type: FloatType, quantizer: str = "rtn"
) -> CompilePlan:
    """Return a plan with one format for all experts and another for attention, embedding and lm_head.

    Norms and routers keep 16 bits. A dense weight that `dense` does not fit has one scale per row, or 16 bits.
    float_type: the 16-bit type of the checkpoint (Lowering.float_type).
    Raises PlanError, which lists the widths, if the format cannot hold the expert matrices.
    """
    units = dict.fromkeys(model.unit_keys(), experts)
    shapes = {model.unit_shape(unit.layer, unit.projection) for unit in units}
    wrong = sorted({columns for _, columns in shapes if not experts.fits(columns)})
    if wrong:
        raise PlanError(
            f"format {experts} cannot hold expert matrices of {', '.join(map(str, wrong))} columns, "
            f"expected a multiple of the group size and of {COLUMNS_PER_TILE}",
            "choose another --group-size" if experts.group_size else "use --uniform 16",
        )
    dense_formats = {
        name: dense_spec(name, shape, int(dense.bitwidth), dense.group_size, float_type, dense.symmetric)
        for name, shape in model.dense_shapes().items()
    }
    return CompilePlan(model, units, dense_formats, quantizer)


def dense_spec(
    name: str, shape: tuple[int, ...], bits: int, group_size: int, float_type: FloatType, symmetric: bool = False
) -> QuantSpec:
    """Return the format of one dense weight: 16 bits for norms, routers and widths that no format fits.

    If the group size does not divide the columns, the format has one scale per row.
    """
    plain = QuantSpec(16, float_type=float_type)
    if bits == 16 or keeps_16_bits(name, shape):
        return plain
    grouped, per_row = QuantSpec(bits, group_size, symmetric), QuantSpec(bits, 0, symmetric)
    return grouped if grouped.fits(shape[-1]) else per_row if per_row.fits(shape[-1]) else plain


def uniform_like(plan: CompilePlan, spec: QuantSpec, quantizer: str | None = None) -> CompilePlan:
    """Return `plan` with all units in one format. Everything else is unchanged."""
    return replace(plan, units=dict.fromkeys(plan.units, spec), quantizer=quantizer or plan.quantizer)


def fits_all(plan: CompilePlan, spec: QuantSpec) -> bool:
    """Return whether every unit fits this format."""
    return all(spec.fits(plan.model.unit_shape(unit.layer, unit.projection)[1]) for unit in plan.units)
