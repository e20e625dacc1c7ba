"""Pulls over loopback from nginx, next to other programs.

    python -m bench.shipping FOLDER [--hidden N | --bundles OLD NEW] [--rounds N] [--only first delta]

FOLDER gets two bundles of random bytes in the yardstick's shape, 16 layers of 64 experts: 4 GiB each with the hidden
size 2048. The second has other bytes in 10 % of the experts. `--bundles` takes two bundles that exist.

* first: the first bundle, by `moec pull`, and by `curl` with `sha256sum` or `openssl dgst -sha256`, in turn. The files
  of the server are in the page cache. OpenSSL uses the SHA instructions of a processor, and Debian's `sha256sum` does
  not.
* delta: the second bundle on a device that has the first, by `moec pull` and by zsync. Then the bytes of
  content-defined chunks of 64 KiB that the first bundle lacks.

Prints one JSON object per measurement, then medians and ratios of medians. The bytes of a delta have a bound: 1.05
times changed experts, dense weights and 1 MB. nginx, curl, sha256sum, openssl, zsync and zsyncmake are those of the
system. Bytes are those of nginx's log.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from moec.manifests.bundle import DENSE_NAME
from moec.runtime.bundle.open_bundle import open_bundle
from moec.shipping.channel import ChannelBundle
from moec.shipping.signatures.keys import encode_public_key
from tests.shipping.model_bundles import Shape, channel_of, described, put_bundle, put_channel, sha256_of, write_bundle
from tests.shipping.signing_keys import signing_key

from .shared_bytes import equal_keys, experts_of

Row = dict[str, object]
PULL = "moec pull"
PORT = 18090
LOOK_EVERY_S = 0.02
NGINX = """
worker_processes 1; pid {folder}/pid; error_log {folder}/error.log; daemon on;
events {{ worker_connections 64; }}
http {{
  log_format sent '$body_bytes_sent'; access_log {folder}/sent.log sent;
  sendfile on; tcp_nopush on; keepalive_requests 1000000;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


MEAN_BITS = 16
"""A cut comes after 2^MEAN_BITS bytes on average, in addition to the shortest chunk."""
SHORTEST, LONGEST = 8 << 10, 128 << 10
_BLOCK = 32 << 20


class Chunks:
    """Chunks of files by digest and size."""

    def __init__(self, seed: int = 5) -> None:
        self._gear = np.random.default_rng(seed).integers(0, 1 << 16, 256, dtype=np.uint16)

    def of(self, path: Path) -> Iterator[tuple[bytes, int]]:
        """Yield digest and size of each chunk of a file."""
        data = np.fromfile(path, np.uint8)
        start = 0
        cuts = self._cuts(data)
        at = 0
        while start < len(data):
            end = min(start + LONGEST, len(data))
            at = int(np.searchsorted(cuts, start + SHORTEST))
            if at < len(cuts) and cuts[at] < end:
                end = int(cuts[at])
            yield hashlib.blake2b(data[start:end].data, digest_size=16).digest(), end - start
            start = end

    def _cuts(self, data: np.ndarray) -> np.ndarray:
        """Return the places after which the low bits of the sum are zero."""
        chunks = []
        for begin in range(0, len(data), _BLOCK):
            first = max(0, begin - MEAN_BITS + 1)
            values = self._gear[data[first : begin + _BLOCK]]
            total = np.zeros(len(values), np.uint16)
            for back in range(min(MEAN_BITS, len(values))):
                total[back:] += values[: len(values) - back] << np.uint16(back)
            places = np.flatnonzero(total == 0) + first + 1
            chunks.append(places[places > begin])
        return np.concatenate(chunks) if chunks else np.zeros(0, np.int64)


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size; 2048 gives 4 GiB")
    parser.add_argument("--bundles", type=Path, nargs=2, metavar=("OLD", "NEW"), help="two bundles of one model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=["first", "delta"], default=["first", "delta"])
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    made = make_bundles(folder, asked.hidden) if asked.bundles is None else [path.resolve() for path in asked.bundles]
    fill_store(folder, made)
    with nginx(folder) as sent_bytes:
        if "first" in asked.only:
            tell_medians([row for number in range(asked.rounds) for row in measure_first(folder, made, number)])
        if "delta" in asked.only:
            measure_delta(folder, made, sent_bytes)


def tell(**values: object) -> None:
    """Print one measurement."""
    print(json.dumps(values), flush=True)


def make_bundles(folder: Path, hidden: int) -> list[Path]:
    """Write two bundles, unless they are there."""
    bundles = [folder / "one", folder / "two"]
    shape = Shape(layers=16, experts=64, hidden=hidden, width=1024, vocabulary=50304)
    for number, bundle in enumerate(bundles):
        if not bundle.exists():
            write_bundle(bundle, shape, partial(_version, number))
    return bundles


def _version(number: int, layer: int, expert: int) -> int:
    """Return the version of an expert in a bundle: its number for every tenth expert, else 0."""
    return number if (layer * 64 + expert) % 10 == 3 else 0


def fill_store(folder: Path, bundles: list[Path]) -> None:
    """Put bundles into a store, each in a channel of its own: `one` and `two`."""
    key, store = signing_key(), folder / "store"
    shutil.rmtree(store, ignore_errors=True)
    (folder / "fleet.pub").write_bytes(encode_public_key(key.public.point))
    now = datetime.now(timezone.utc) - timedelta(hours=1)
    for name, bundle in zip(("one", "two"), bundles, strict=True):
        put_bundle(store, bundle, key)
        model = open_bundle(bundle).manifest.name
        told: list[ChannelBundle] = [described(bundle)]
        put_channel(store, channel_of(told, 1, model=model, channel=name, created=now), key)


@contextmanager
def nginx(folder: Path) -> Iterator[Callable[[], int]]:
    """Serve the store on loopback. Yields a function that returns the bytes of all bodies so far."""
    place = folder / "nginx"
    place.mkdir(exist_ok=True)
    log = place / "sent.log"
    log.unlink(missing_ok=True)
    (place / "nginx.conf").write_text(NGINX.format(folder=place, port=PORT, root=folder / "store"))
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") or "nginx"
    command = [program, "-c", str(place / "nginx.conf")]
    subprocess.run(command, check=True)

    def sent_bytes() -> int:
        time.sleep(0.2)
        return sum(int(line) for line in log.read_text().split())

    try:
        yield sent_bytes
    finally:
        subprocess.run([*command, "-s", "stop"], check=True)


def cpu_s() -> float:
    """Return the processor time of all programs that have ended, seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def pull(folder: Path, device: Path, channel: str) -> dict[str, object]:
    """Run `moec pull`.

    Returns seconds until all bytes were checked, seconds and processor seconds in all, and the peak of memory. In all
    includes the process that opens the bundle.
    """
    before_s = cpu_s()
    command = [sys.executable, "-m", "moec.cli.main", "pull", f"http://127.0.0.1:{PORT}", device, "--json"]
    started = time.monotonic()
    words = [*command, "--key", folder / "fleet.pub", "--channel", channel]
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, text=True)
    told: dict[str, tuple[float, dict[str, object]]] = {}

    def listen(lines: IO[str]) -> None:
        for line in lines:
            event = json.loads(line)
            told[event["event"]] = (time.monotonic() - started, event)

    assert process.stdout is not None
    listening = threading.Thread(target=listen, args=[process.stdout])
    listening.start()
    peak_kib = 0
    while process.poll() is None:
        peak_kib = max(peak_kib, _peak_kib(process.pid))
        time.sleep(LOOK_EVERY_S)
    seconds = time.monotonic() - started
    listening.join()
    if process.returncode:
        raise RuntimeError(f"the pull ended with {process.returncode}")
    planned = told["planned"][1]
    return {
        "checked_s": round(told["testing"][0], 2),
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu_s() - before_s, 2),
        "peak_mib": round(peak_kib / 1024, 1),
        **{name: value for name, value in planned.items() if name.endswith("_bytes")},
    }


def _peak_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def measure_first(folder: Path, bundles: list[Path], number: int) -> list[Row]:
    """Pull the first bundle, and fetch it with curl and two programs for digests, in an order that alternates."""
    subprocess.run(["cat", *bundles[0].iterdir()], stdout=subprocess.DEVNULL, check=True)
    ways: list[Callable[[], Row]] = [
        lambda: _pull_first(folder, number),
        lambda: _curl(folder, bundles[0], number, "sha256sum"),
        lambda: _curl(folder, bundles[0], number, "openssl dgst -sha256"),
    ]
    rows = []
    for way in ways if number % 2 == 0 else reversed(ways):
        os.sync()
        rows.append(way())
        tell(**rows[-1])
    return rows


def tell_medians(rows: list[Row]) -> None:
    """Print the median of every number for each way, and the speed of a pull as a multiple of the other ways' speed.

    A pull has fetched and checked the bundle when curl has fetched it and its digests are known.
    """
    medians: dict[str, dict[str, float]] = {}
    for way in sorted({str(row["way"]) for row in rows}):
        own = [row for row in rows if row["way"] == way]
        names = [name for name, value in own[0].items() if isinstance(value, float)]
        medians[way] = {name: statistics.median(float(str(row[name])) for row in own) for name in names}
        tell(medians_of=way, rounds=len(own), **medians[way])
    for way in sorted(set(medians) - {PULL}):
        ratio = medians[way]["hashed_s"] / medians[PULL]["checked_s"]
        tell(speed_of=PULL, as_multiple_of=way, ratio=round(ratio, 3))


def _pull_first(folder: Path, number: int) -> Row:
    device = folder / "device"
    shutil.rmtree(device, ignore_errors=True)
    row = {"way": PULL, "round": number, **pull(folder, device, "one")}
    shutil.rmtree(device)
    return row


def _curl(folder: Path, bundle: Path, number: int, digest: str) -> Row:
    """Fetch all files with one curl, one connection. Digests are computed after that, and the disk is synced."""
    target = folder / "curl"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    base = f"http://127.0.0.1:{PORT}/{sha256_of(bundle)}"
    names = sorted(path.name for path in bundle.iterdir())
    urls = [word for name in names for word in ("-O", f"{base}/{name}")]
    before_s, started = cpu_s(), time.monotonic()
    subprocess.run(["curl", "--silent", "--fail", *urls], cwd=target, check=True)
    fetched_s = time.monotonic() - started
    subprocess.run([*digest.split(), *names], cwd=target, stdout=subprocess.DEVNULL, check=True)
    hashed_s = time.monotonic() - started
    subprocess.run(["sync", "--file-system", target], check=True)
    synced_s = time.monotonic() - started
    told = {"fetched_s": fetched_s, "hashed_s": hashed_s, "synced_s": synced_s, "cpu_s": cpu_s() - before_s}
    shutil.rmtree(target)
    return {"way": f"curl + {digest}", "round": number, **{name: round(value, 2) for name, value in told.items()}}


def measure_delta(folder: Path, bundles: list[Path], sent_bytes: Callable[[], int]) -> None:
    """Bring the second bundle to a device that has the first."""
    old, new = (open_bundle(bundle).manifest for bundle in bundles)
    experts = experts_of(new)
    equal = equal_keys(experts, experts_of(old))
    changed = set(experts) - equal
    changed_bytes = sum(experts[key][1] for key in changed)
    dense_bytes = (bundles[1] / DENSE_NAME).stat().st_size
    bound_bytes = round(1.05 * (changed_bytes + dense_bytes + 1_000_000))
    tell(changed_experts=len(changed), experts=len(experts), bytes=changed_bytes, dense_bytes=dense_bytes)
    device = folder / "device"
    shutil.rmtree(device, ignore_errors=True)
    pull(folder, device, "one")
    before = sent_bytes()
    told = pull(folder, device, "two")
    sent = sent_bytes() - before
    share = round(sent / bound_bytes, 3)
    tell(way=f"{PULL} of the second bundle", sent_bytes=sent, bound_bytes=bound_bytes, share_of_bound=share, **told)
    shutil.rmtree(device)
    _zsync(folder, bundles, sent_bytes)
    chunks, started = Chunks(), time.monotonic()
    known = {chunk for path in sorted(bundles[0].iterdir()) for chunk in chunks.of(path)}
    wanted = {chunk for path in sorted(bundles[1].iterdir()) for chunk in chunks.of(path)}
    lacking = wanted - known
    tell(
        way="content-defined chunks",
        chunks=len(wanted),
        mean_bytes=round(sum(size for _, size in wanted) / len(wanted)),
        lacking_chunks=len(lacking),
        bytes=sum(size for _, size in lacking),
        list_bytes=36 * len(wanted),
        seconds=round(time.monotonic() - started, 1),
    )


def _zsync(folder: Path, bundles: list[Path], sent_bytes: Callable[[], int]) -> None:
    """Fetch each file of the second bundle with zsync, from the file of the same name of the first."""
    target, store = folder / "zsync", folder / "store" / "zsync"
    for place in (target, store):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    base, made_s, seconds, before = f"http://127.0.0.1:{PORT}", 0.0, 0.0, sent_bytes()
    index_bytes = 0
    for path in sorted(bundles[1].iterdir()):
        if path.stat().st_size == 0:
            continue
        url = f"{base}/{sha256_of(bundles[1])}/{path.name}"
        index = store / f"{path.name}.zsync"
        started = time.monotonic()
        subprocess.run(["zsyncmake", "-u", url, "-o", index, path], check=True, capture_output=True)
        made_s += time.monotonic() - started
        index_bytes += index.stat().st_size
        started = time.monotonic()
        command = ["zsync", "-q", "-i", str(bundles[0] / path.name), "-o", path.name, f"{base}/zsync/{index.name}"]
        subprocess.run(command, cwd=target, check=True, capture_output=True)
        seconds += time.monotonic() - started
        if (target / path.name).read_bytes() != path.read_bytes():
            raise RuntimeError(f"zsync made another `{path.name}`")
        (target / path.name).unlink()
    tell(
        way="zsync",
        sent_bytes=sent_bytes() - before,
        index_bytes=index_bytes,
        seconds=round(seconds, 1),
        zsyncmake_s=round(made_s, 1),
    )
    shutil.rmtree(store)
    shutil.rmtree(target)


if __name__ == "__main__":
    main()
