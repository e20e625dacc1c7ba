"""Time to the first token of the tenth turn of a conversation, next to the engine alone on the same prefix.

    python -m bench.serving.tenth_turn FOLDER [--rounds N]

FOLDER gets a bundle of random weights: 8 layers of 16 experts, hidden size 512, and a chat template. Each round holds a
conversation of ten turns with a server on loopback, in this process. The tenth turn is timed by the client, from its
request to the first piece of the answer, template, tokenizer and HTTP included. Then the engine computes the same new
tokens at the same positions, on the same keys and values, and their logits. Prints one JSON object per round, then the
medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from moec.runtime import Engine, load
from tests.gates.bundles import emit_bundle
from tests.listed_file import add_listed
from tests.serving.live_server import LiveServer, live_server
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

PATH, TURNS, CONTEXT = "/v1/chat/completions", 10, 2048
TEMPLATE = b"{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
QUESTION = "{} asks how many roses there are in the gardens of this town, and who counts them in the autumn."


def make_bundle(folder: Path) -> Path:
    """Return the bundle, made if it is missing."""
    if (folder / "bundle" / "moec.json").exists():
        return folder / "bundle"
    tiny = TinyMixtral(hidden_size=512, layers=8, heads=8, kv_heads=4, experts=16, width=512, seed=34)
    model = save_tiny_mixtral(folder / "model", tiny)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": CONTEXT}))
    bundle = emit_bundle(model, folder / "bundle", mixed=True)
    add_listed(bundle, "chat_template.jinja", TEMPLATE)
    return bundle


def first_token_s(server: LiveServer, messages: list[dict[str, str]]) -> tuple[float, dict[str, Any], str]:
    """Return the time to the first token that a client sees, the timings that the server tells, and the answer."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "stream": True}
    connection = server.connect()
    started = time.perf_counter()
    connection.request("POST", PATH, json.dumps(body))
    reply = connection.getresponse()
    first, text, timings = 0.0, "", dict[str, Any]()
    for line in reply:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - started
            event = json.loads(line[6:])
            text += event["choices"][0]["delta"].get("content", "")
            timings = event.get("timings", timings)
    connection.close()
    return first, timings, text


def direct_s(engine: Engine, messages: list[dict[str, str]], timings: dict[str, Any]) -> float:
    """Return the time of the new tokens in the engine alone."""
    text = "".join(f"{message['role']}:{message['content']}\n" for message in messages) + "assistant:"
    tokens = engine.encode(text, adds_special_tokens=False)
    first = timings["cached_tokens"]
    slot = 0  # of one slot
    started = time.perf_counter()
    hidden = engine.step(tokens[first:], [slot] * (len(tokens) - first), range(first, len(tokens)))
    engine.model.logits(hidden[-1:])
    return time.perf_counter() - started


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows: list[dict[str, float]] = []
    bundle = make_bundle(options.folder)
    with load(bundle, context=CONTEXT, slots=1) as engine, live_server(engine) as server:
        for number in range(options.rounds):
            messages: list[dict[str, str]] = []
            for turn in range(TURNS):
                messages.append({"role": "user", "content": QUESTION.format(chr(65 + number % 26) * 3 + str(turn))})
                first, timings, text = first_token_s(server, messages)
                if turn < TURNS - 1:
                    messages.append({"role": "assistant", "content": text})
            server.wait_until_idle()
            new = timings["prompt_tokens"] - timings["cached_tokens"]
            row = {"served_ms": first * 1e3, "told_ms": timings["ttft_ms"], "direct_ms": 0.0, "new": new}
            row["direct_ms"] = direct_s(engine, messages, timings) * 1e3
            rows.append(row)
            print(json.dumps({**row, "prompt": timings["prompt_tokens"]}), flush=True)
    medians = {name: statistics.median(row[name] for row in rows) for name in ("served_ms", "told_ms", "direct_ms")}
    ratio = statistics.median(row["served_ms"] / row["direct_ms"] for row in rows)
    print(json.dumps({**medians, "ratio": ratio}))


if __name__ == "__main__":
    main()
