"""The rate of storage.

    python -m bench.yardstick.peers.probes BUNDLE

`compare.py` runs it in the control group of a run. Prints one JSON object.

It reads whole experts directly, at random places of all expert files, two at a time, as the runtime does. The process
does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moec.profiles.probe import large_pages

READERS = 2
BLOCK_BYTES = 4096


def storage_rate(bundle: Path, seconds: float) -> dict[str, float]:
    """Return all bytes divided by all of the time, bytes per second."""
    manifest = json.loads((bundle / "moec.json").read_text(encoding="utf-8"))
    size = max(entry["size_bytes"] for entry in manifest["experts"])
    files = [bundle / name for name in sorted({entry["file"] for entry in manifest["experts"]})]
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
    ends = [os.fstat(descriptor).st_size - size for descriptor in descriptors]
    started = time.perf_counter()

    def read(seed: int) -> int:
        places, count = random.Random(seed), 0
        with large_pages(size) as buffer:
            while time.perf_counter() - started < seconds:
                at = places.randrange(len(descriptors))
                count += os.preadv(descriptors[at], [buffer], places.randrange(ends[at]) // BLOCK_BYTES * BLOCK_BYTES)
        return count

    with ThreadPoolExecutor(READERS) as pool:
        total = sum(pool.map(read, (time.time_ns(), time.time_ns() + 1)))
    elapsed = time.perf_counter() - started
    return {"storage_bytes_per_s": total / elapsed, "request_bytes": size, "readers": READERS}


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description="The rate of storage.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    print(json.dumps(storage_rate(options.bundle, options.seconds)))


if __name__ == "__main__":
    main()
