"""Tasks, metrics and paired statistics. Knows neither compiler nor runtime: it is handed an engine.

    data.load_splits, data.load_items     JSONL, folders and hub sets -> ItemSet
    tasks.find_task, tasks.infer_task     what a task asks, how its answer is read and scored
    run.evaluate, run.compare             engine + items -> EvaluationResult; two results -> LossEstimate
    statistics                            paired bootstrap, verdicts, summaries of KL and agreement
    hf_metrics.load_metric                the same metrics as `evaluate.Metric`

Importing any of these loads numpy and the standard library only; `datasets`, `evaluate` and `rouge_score` are
loaded by the functions that need them (extra `[eval]`).
"""
