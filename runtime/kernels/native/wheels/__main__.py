"""Build the wheels of moec, for machines without a compiler: `make wheels`.

    python -m moec.runtime.kernels.native.wheels -o dist
    python -m moec.runtime.kernels.native.wheels -o dist --python 3.10 --headers 3.10=/opt/python310/include

Without `--python`, it builds each version whose headers it finds, and says which ones it left out. It fails if it finds
none for a version that was asked for, and if a wheel breaks a promise (wheel_file.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .targets import PROCESSORS, PYTHONS, Headers, PackagesUnavailable, Target, find_headers
from .wheel_file import SOURCES, CompileFailed, WheelRefused, add_extension, check_wheel, compile_extension, plain_wheel

PROJECT = SOURCES.parents[2]


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="make wheels")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the wheels")
    parser.add_argument("--build", type=Path, default=PROJECT / "build" / "wheels", help="folder of objects")
    parser.add_argument("--processor", action="append", choices=PROCESSORS, help="default: all")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="default: all with headers here")
    parser.add_argument("--headers", action="append", default=[], metavar="VERSION=FOLDER", help="headers of a Python")
    parser.add_argument("--offline", action="store_true", help="fetch no headers from Debian")
    return parser.parse_args()


def headers_or_none(target: Target, given: dict[str, Path], debian: Path | None, is_asked: bool) -> Headers | None:
    """Return the headers for a wheel; None if it is left out. Raises PackagesUnavailable if it was asked for."""
    try:
        headers = find_headers(target, given, debian)
        if headers is None:
            raise PackagesUnavailable(f"no headers of Python; name them: --headers {target.python}=FOLDER")
    except PackagesUnavailable as error:
        if is_asked:
            raise
        print(f"NOT BUILT: {target.tag}: {error}", file=sys.stderr)
        return None
    return headers


def main() -> None:
    """Build, check and list the wheels."""
    options = parse_options()
    named = [header.partition("=") for header in options.headers]
    given = {version: Path(folder).resolve() for version, _, folder in named}
    build, debian = options.build.resolve(), None if options.offline else options.build.resolve() / "debian"
    targets = [
        Target(python, processor)
        for processor in options.processor or PROCESSORS
        for python in options.python or PYTHONS
    ]
    headers_of_targets = [(target, headers_or_none(target, given, debian, bool(options.python))) for target in targets]
    plain = plain_wheel(PROJECT, build)
    for target, headers in headers_of_targets:
        if headers is None:
            continue
        start = time.monotonic()
        extension = compile_extension(target, headers, build, Path(sys.executable).parent)
        wheel = add_extension(plain, extension, target.tag, target.extension, options.output)
        for line in check_wheel(wheel, target):
            print(f"  {line}", file=sys.stderr)
        size, seconds = wheel.stat().st_size / 1e6, time.monotonic() - start
        print(f"{wheel}: {size:.2f} MB, headers of {headers.source}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (PackagesUnavailable, CompileFailed, WheelRefused) as error:
        sys.exit(f"error: {error}")
