"""Best uniform format at the target of a bundle, among the formats between two bitwidths.

    python uniform.py BUNDLE EXAMPLE MEASUREMENTS LEAST_BITS MOST_BITS

EXAMPLE: folder of `make example-smollm2`. MEASUREMENTS: that of the compile.
"""

import json
import sys
from pathlib import Path

from moec.cli.commands.bundles.inspect import read_quality
from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.cli.terminal.compile_log import CompileLog
from moec.compiler.measured_bundle import BundleRequest, opened_measurement, prepare_measurement
from moec.compiler.request.options import Talk
from moec.compiler.search.baselines import best_uniform, bytes_at_kl
from moec.compiler.search.comparison import UNIFORM, target_rule
from moec.compiler.stages.measure import measure
from moec.profiles.loading import load_profile
from moec.runtime.bundle.opening import open_bundle

folder, example, kept = (Path(each).resolve() for each in sys.argv[1:4])
least, most = map(float, sys.argv[4:])
opened = open_bundle(folder)
log = CompileLog(folder.with_name(folder.name + ".uniform"))
request = BundleRequest(
    folder, opened.manifest, read_quality(opened) or {}, str(example / "model"), str(example / "data/prose"),
    load_profile("host", folder.parent), open_partial, Talk(log.note, log.progress), True, 0, kept,
)  # fmt: skip
measurement = prepare_measurement(request, ".uniform", "auto")
with log, opened_measurement(measurement) as context:
    trials = measure(context).trials
    plan, specs = measurement.plan, [spec for spec in measurement.prepared.specs if least <= spec.bitwidth <= most]
    target = measurement.prepared.request.options.target
    own = trials.kl(plan, "plan").mean
    rule = target_rule(trials, target, plan.expert_packed_bytes, UNIFORM, None)
    found = best_uniform(plan, specs, trials, rule)
    told = {
        **found.to_json(),
        "formats": [str(spec) for spec in specs],
        "spec": None if found.plan is None else str(next(iter(found.plan.units.values()))),
        "plan_bytes": plan.expert_packed_bytes,
        "plan_bits": plan.bits_per_weight,
        "plan_kl": own,
        "bytes_at_equal_kl": bytes_at_kl(found.frontier, own),
        "trials": [trial.to_json() for trial in trials.log],
    }
    print(json.dumps(told, indent=1))
