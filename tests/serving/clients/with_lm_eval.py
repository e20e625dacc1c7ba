"""Scores that lm-evaluation-harness gets through a server: one choice task and one generation task from local files.

Run in build/serving-clients: address and folder of the tasks, then JSON on standard output.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = ["rose_choices", "rose_answers"]


def main(address: str, folder: str) -> dict[str, Any]:
    arguments = {"base_url": f"{address}/v1/completions", "model": "bundle", "num_concurrent": 2, "max_retries": 1}
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=TASKS,
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = {
        name: [{"doc": each["doc_id"], "answers": each["resps"]} for each in found["samples"][name]] for name in TASKS
    }
    return {"results": {name: found["results"][name] for name in TASKS}, "samples": samples}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:]), default=str))
