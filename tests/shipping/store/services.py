"""Services on loopback that tests of stores talk to: docker-registry, moto and nginx, each a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "build" / "shipping-tools"
_START_S = 60.0
MOTO = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""


def program(name: str, is_required: bool = False) -> str:
    """Return the path of a service's program. Skips the test if it is not installed, fails where it must be.

    is_required: whether MOEC_REQUIRE_SERVICES=1 asks for it.
    """
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None and is_required and os.environ.get("MOEC_REQUIRE_SERVICES") == "1":
        pytest.fail(f"`{name}` is not installed")
    if found is None:
        pytest.skip(f"NOT RUN: stores on {name}, because it is not installed")
    return found


def tools_python() -> Path:
    """Return the interpreter with moto. Skips the test where it is not installed, fails in CI."""
    python = TOOLS / "bin" / "python"
    if (TOOLS / ".ready").exists():
        return python
    if os.environ.get("CI"):
        pytest.fail("`make shipping-tools` has not filled build/shipping-tools")
    pytest.skip("needs `make shipping-tools`")


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def running(arguments: list[str], url: str, log: Path, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a service until the end of the block. It must answer at a URL. Its messages go to a file."""
    settings = {**os.environ, **(environment or {})}
    with log.open("wb") as told, subprocess.Popen(arguments, env=settings, stdout=told, stderr=told) as process:
        try:
            _wait(process, url, log)
            yield
        finally:
            process.terminate()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError as answered:
            answered.close()
            return
        except OSError:
            time.sleep(0.02)
    pytest.fail(f"{process.args!r} does not answer: {log.read_text()[-2000:]}")


@contextlib.contextmanager
def docker_registry(folder: Path, authentication: str = "") -> Iterator[str]:
    """Run Debian's docker-registry. Yields its host and port.

    authentication: lines of its configuration.
    """
    port = free_port()
    settings = f"""\
        version: 0.1
        log: {{level: error, accesslog: {{disabled: true}}}}
        storage: {{filesystem: {{rootdirectory: "{folder / "blobs"}"}}}}
        http: {{addr: "127.0.0.1:{port}"}}
        """
    path = folder / "registry.yml"
    path.write_text(textwrap.dedent(settings) + textwrap.dedent(authentication))
    with running(
        [program("docker-registry", is_required=True), "serve", str(path)],
        f"http://127.0.0.1:{port}/v2/",
        folder / "registry.log",
        {"OTEL_TRACES_EXPORTER": "none"},
    ):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Run moto, which speaks S3. Yields its URL."""
    with subprocess.Popen(
        [str(tools_python()), "-c", MOTO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[str]:
    """Run nginx with WebDAV. Yields its URL."""
    port, root = free_port(), folder / "root"
    root.mkdir()
    settings = f"""\
        daemon off;
        master_process off;
        pid {folder}/nginx.pid;
        error_log stderr crit;
        events {{}}
        http {{
            access_log off;
            client_max_body_size 0;
            client_body_temp_path {folder}/body;
            proxy_temp_path {folder}/proxy;
            fastcgi_temp_path {folder}/fastcgi;
            uwsgi_temp_path {folder}/uwsgi;
            scgi_temp_path {folder}/scgi;
            server {{
                listen 127.0.0.1:{port};
                root {root};
                dav_methods PUT MKCOL COPY;
            }}
        }}
        """
    path = folder / "nginx.conf"
    path.write_text(textwrap.dedent(settings))
    with running(
        [program("nginx"), "-e", "stderr", "-c", str(path)], f"http://127.0.0.1:{port}/", folder / "nginx.log"
    ):
        yield f"http://127.0.0.1:{port}"
