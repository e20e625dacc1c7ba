"""The plan of `--uniform`: one format for all routed experts, no search and no data."""

from __future__ import annotations

from dataclasses import replace

from moec.manifests.errors import PlanError
from moec.manifests.model import ModelSpec
from moec.manifests.quant import COLUMNS_PER_TILE, FloatType, QuantSpec

from ..families import Lowering
from .options import CompileOptions
from .plan import CompilePlan


def uniform_spec(options: CompileOptions, lowering: Lowering) -> QuantSpec:
    """The format of all experts; 4 bits of a checkpoint of 4-bit floats are those, unless groups are asked for."""
    bits = options.target.value
    if bits == 16:
        return lowering.spec_16bit
    if bits == 4 and lowering.own_unit_spec.is_mxfp4 and not options.group_sizes and options.symmetric is None:
        return lowering.own_unit_spec
    return QuantSpec(bits, options.uniform_group, options.is_uniform_symmetric)


def uniform_quantizer(options: CompileOptions) -> str:
    """There is no data that GPTQ could work from."""
    return "rtn" if options.quantizer == "gptq" else options.quantizer


def uniform_plan(
    model: ModelSpec,
    bitwidth: float,
    group_size: int,
    dense_bits: int,
    float_type: FloatType,
    quantizer: str = "rtn",
    symmetric: bool = False,
    own: QuantSpec | None = None,
) -> CompilePlan:
    """One format for all experts, another for attention, embedding and lm_head; norms and routers keep 16 bits.

    group_size 0: one scale per row. symmetric: no minima, in the dense weights neither. own: the format of the experts
    where they keep what the checkpoint has, whatever the rest says.
    float_type: the 16-bit type of the checkpoint (Lowering.float_type).
    Raises PlanError if the format cannot hold the expert matrices, with every width that it does not divide.
    """
    plain = QuantSpec(16, float_type=float_type)
    spec = own or (plain if bitwidth == 16 else QuantSpec(bitwidth, group_size, symmetric))
    units = dict.fromkeys(model.unit_keys(), spec)
    shapes = {model.unit_shape(unit.layer, unit.projection) for unit in units}
    wrong = sorted({columns for _, columns in shapes if not spec.fits(columns)})
    if wrong:
        raise PlanError(
            f"format {spec} cannot hold expert matrices of {', '.join(map(str, wrong))} columns, expected a multiple "
            f"of the group size and of {COLUMNS_PER_TILE}",
            "choose another --group-size" if spec.group_size else "use --uniform 16",
        )
    dense = {
        name: dense_spec(name, shape, dense_bits, group_size, float_type, symmetric)
        for name, shape in model.dense_shapes().items()
    }
    return CompilePlan(model, units, dense, quantizer)


def dense_spec(
    name: str, shape: tuple[int, ...], bits: int, group_size: int, float_type: FloatType, symmetric: bool = False
) -> QuantSpec:
    """The format of one dense weight: 16 bits for norms, routers and widths that no group divides.

    Where the group size does not divide the columns, one scale per row takes its place.
    """
    plain = QuantSpec(16, float_type=float_type)
    if bits == 16 or len(shape) == 1 or name.endswith("router"):
        return plain
    grouped, per_row = QuantSpec(bits, group_size, symmetric), QuantSpec(bits, 0, symmetric)
    return grouped if grouped.fits(shape[-1]) else per_row if per_row.fits(shape[-1]) else plain


def uniform_like(plan: CompilePlan, spec: QuantSpec, quantizer: str | None = None) -> CompilePlan:
    """All units in one format, everything else as in `plan`."""
    return replace(plan, units=dict.fromkeys(plan.units, spec), quantizer=quantizer or plan.quantizer)


def fits_all(plan: CompilePlan, spec: QuantSpec) -> bool:
    """Whether every unit can be stored in this format."""
    return all(spec.fits(plan.model.unit_shape(unit.layer, unit.projection)[1]) for unit in plan.units)
