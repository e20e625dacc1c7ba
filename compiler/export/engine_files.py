"""Files of an engine's plan: tensor types of llama-quantize, a predicate of mlx-lm, rules of GPTQModel.

Formats, as their readers take them:

* llama-quantize splits `--tensor-type-file` at white space. A part is REGEX=TYPE. The first expression that occurs in
  the name of a tensor counts, and only if the type of the whole file is quantized.
  Source: llama.cpp, tools/quantize/quantize.cpp and src/llama-quant.cpp.
* `convert` of mlx-lm calls `quant_predicate(path, module)` for every module. It returns False, or bits and group size.
  Source: mlx-lm, convert.py and utils.py.
* `dynamic` of GPTQModel's `QuantizeConfig` maps expressions to settings. `-:` leaves modules as they are. The first
  expression that matches the start of a module's name counts, those with `-:` first.
  Source: GPTQModel, quantization/config.py.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping

from moec.manifests.model import UnitKey

from .coarse_plan import EnginePlan
from .engine_formats import GPTQMODEL, LLAMA_CPP, EngineFormat
from .engine_names import (
    gptqmodel_dense,
    gptqmodel_experts,
    llama_cpp_dense,
    llama_cpp_stack,
    mlx_dense,
    mlx_stack,
)

_PREDICATE = '''"""Formats for mlx-lm: python {name} MODEL TARGET

Or: from {module} import quant_predicate, and mlx_lm.convert(..., quantize=True, q_group_size={group},
quant_predicate=quant_predicate). A wider q_group_size would leave narrow modules unquantized.
"""

import sys

FORMATS = {formats}


def quant_predicate(path, module, *_):
    """Return bits and group size of a module. False: it keeps 16 bits."""
    settings = FORMATS.get(path, FORMATS.get(path.rpartition(".")[0]))
    if settings is None or module.weight.shape[-1] % settings["group_size"]:
        return False
    return dict(settings)


if __name__ == "__main__":
    from mlx_lm import convert

    convert(
        sys.argv[1], sys.argv[2], quantize=True, q_group_size={group}, q_bits=4, quant_predicate=quant_predicate
    )
'''
_LEAST_GROUP = 32


def engine_file(plan: EnginePlan, name: str) -> str:
    """Return the content of the file.

    name: name of the file, for its own text.
    """
    if plan.engine == LLAMA_CPP:
        return tensor_types(plan)
    return dynamic_rules(plan) if plan.engine == GPTQMODEL else predicate(plan, name)


def tensor_types(plan: EnginePlan) -> str:
    """Return the lines REGEX=TYPE of llama-quantize."""
    lines = [f"{llama_cpp_dense(group)}={engine_format.name}" for group, engine_format in plan.dense.items()]
    for (layer, projection), engine_format in _stacks(plan).items():
        lines.append(f"^{re.escape(llama_cpp_stack(layer, projection))}$={engine_format.name}")
    return "\n".join(lines) + "\n"


def predicate(plan: EnginePlan, name: str) -> str:
    """Return a Python file with `quant_predicate`. It has no entry for modules that keep 16 bits."""
    model, formats = plan.plan.model, dict[str, Mapping[str, object]]()
    for group, engine_format in plan.dense.items():
        if engine_format.is_quantized:
            formats.update(dict.fromkeys(mlx_dense(model, group), engine_format.settings))
    for (layer, projection), engine_format in _stacks(plan).items():
        if engine_format.is_quantized:
            formats[mlx_stack(model.family, layer, projection)] = engine_format.settings
    lines = "".join(
        f"    {json.dumps(path)}: {json.dumps(dict(engine_format))},\n" for path, engine_format in formats.items()
    )
    shown = name if re.fullmatch(r"[\w.-]+", name) else "FILE"
    module = shown.removesuffix(".py")
    return _PREDICATE.format(
        name=shown, module=module if module.isidentifier() else "FILE", group=_LEAST_GROUP, formats=f"{{\n{lines}}}"
    )


def dynamic_rules(plan: EnginePlan) -> str:
    """Return the JSON object of `QuantizeConfig(dynamic=...)`: a rule per layer, projection and format."""
    model, rules = plan.plan.model, dict[str, dict[str, object]]()
    for group, engine_format in plan.dense.items():
        pattern = gptqmodel_dense(group)
        if pattern is not None:
            rules[_rule(pattern, engine_format)] = dict(engine_format.settings)
    experts = defaultdict[tuple[int, str, str], list[int]](list)
    for unit, engine_format in plan.units.items():
        experts[unit.layer, unit.projection, engine_format.name].append(unit.expert)
    for (layer, projection, _), chosen in experts.items():
        engine_format = plan.units[UnitKey(layer, chosen[0], projection)]
        pattern = gptqmodel_experts(model.family, layer, projection, chosen, model.layers[layer].experts.count)
        rules[_rule(pattern, engine_format)] = dict(engine_format.settings)
    lines = (f" {json.dumps(pattern)}: {json.dumps(settings)}" for pattern, settings in rules.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rule(pattern: str, engine_format: EngineFormat) -> str:
    return f"{'+' if engine_format.is_quantized else '-'}:{pattern}"


def _stacks(plan: EnginePlan) -> dict[tuple[int, str], EngineFormat]:
    """Return the one format of each layer and projection."""
    return {(unit.layer, unit.projection): engine_format for unit, engine_format in plan.units.items()}
