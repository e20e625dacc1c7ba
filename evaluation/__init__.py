"""Tasks, metrics and paired statistics. Independent of compiler and runtime: it receives an engine.

* `data.load_splits`, `data.load_items`: JSONL, folders and hub sets -> ItemSet.
* `tasks.find_task`, `tasks.infer_task`: prompt, answer and score of a task.
* `run.evaluate`, `run.compare`: engine + items -> EvaluationResult; two results -> LossEstimate.
* `statistics`: paired bootstrap, verdicts, summaries of KL and agreement.

Importing any of them loads only numpy and the standard library.
Metrics of moec are computed directly: the import of `evaluate` takes seconds, and its scores have no items to pair.
The functions that need `datasets`, `evaluate` or `rouge_score` load them (extra `[eval]`).
"""
