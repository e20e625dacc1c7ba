"""Loss of perplexity of the two bundles, from the items of this folder. Run in the root of the repository."""

import json
import sys
from pathlib import Path

sys.path.insert(0, "build/links")
from moec.evaluation.statistics import perplexity_loss

HERE = Path(__file__).parent
tokens, nll = zip(*json.loads((HERE / "checkpoint.json").read_text())["items"], strict=True)
for name in ("2-percent", "5-percent"):
    own_tokens, own_nll = zip(*json.loads((HERE / f"{name}.json").read_text())["items"], strict=True)
    found = perplexity_loss(nll, tokens, own_nll, own_tokens)
    low, high = found.interval95
    print(f"{name}: {found.loss:.4f} ({low:.4f} to {high:.4f}), upper bound {found.upper95:.4f}")
