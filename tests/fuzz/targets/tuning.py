"""`BUNDLE.tune.json`, which stands next to a bundle."""

from __future__ import annotations

import json

from moec.runtime.tuning.tune_file import SUFFIX, read_tuning
from tests.fuzz.targets.scratch import file_of


def target(data: bytes) -> None:
    path = file_of(f"bundle{SUFFIX}", data)
    try:
        read_tuning(path.with_name("bundle"))
    except ValueError:
        return


def seeds() -> list[bytes]:
    options = {"policy": "hobbit", "policy_weights": "0.1,0.5,0,0.4", "threads": 2, "readers": 1, "prefetch": "off"}
    trials = [{"option": "threads", "value": 2, "gain": 0.1, "kept": True}]
    digests = dict.fromkeys(("machine", "storage", "bundle"), "0" * 64)
    plain = {"format_version": 1, **digests, "expert_cache_bytes": 1, "options": options, "trials": trials}
    return [json.dumps(plain).encode(), json.dumps({**plain, "options": {}, "trials": []}).encode()]
