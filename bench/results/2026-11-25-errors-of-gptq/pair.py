import json
import sys
import time

import torch

from moec.compiler.quantization.layer_quantizer import ExpertQuantizer
from moec.manifests.quant import QuantSpec

torch.set_num_threads(1)
old = sys.argv[1] == "old"
g = torch.Generator().manual_seed(0)
D, F = 2048, 1024
W = {
    "gate": torch.randn(F, D, generator=g) * 0.02,
    "up": torch.randn(F, D, generator=g) * 0.02,
    "down": torch.randn(D, F, generator=g) * 0.02,
}


def mom(n):
    M = torch.randn(n, n, generator=g) / n**0.5 + torch.eye(n)
    X = torch.randn(2500, n, generator=g) @ M
    H = X.T @ X
    return H[None] if old else H


m = (mom(D), mom(F))
out = {}
with torch.inference_mode():
    for t in ["q1g64b", "q1.6g128s", "q2g64b", "q2g32b", "q3g64b", "q4g64b", "q8g128"]:
        s = QuantSpec.parse(t)
        b = time.thread_time()
        r = ExpertQuantizer(0, "gptq", (s,)).run(0, W, m, 2500)
        tot = time.thread_time() - b
        errs = []
        for (u, _), q in r.items():
            H = m[1] if u.projection == "down" else m[0]
            H = (H[0] if old else H).double()
            d = (q.dequantize() - W[u.projection]).double()
            w = W[u.projection].double()
            errs.append(float(((d @ H) * d).sum() / ((w @ H) * w).sum()))
        out[t] = [tot, sum(errs) / 3]
print(json.dumps(out))
