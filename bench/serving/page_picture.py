"""The picture of the chat page in the README.

    make page-driver
    PYTHONPATH=build/page-driver python -m bench.serving.page_picture [BUNDLE] [-o docs/pictures/chat-page.png]

A server with half of the experts in memory answers one question in Debian's chromium, after the same question in an
earlier chat. The map has the experts of the last tenth of a second.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image

from .servers import Server

QUESTION = "Question: 6 dolls cost 90 dollars. How much do 2 dolls cost?\nAnswer:"
WIDTH, HEIGHT = 1100, 520
COLOURS = 64
_PATIENCE_MS = 60_000
_DRAWN_MS = 120
"""Time after an answer in which the page draws the experts that it used."""


def command(bundle: Path) -> list[str]:
    """Return the command line of the server that the README names."""
    return [sys.executable, "-m", "moec.cli.main", "serve", str(bundle), "--expert-cache", "50%", "--port", "0"]


def draw(address: str, picture: Path) -> None:
    """Ask the question on the page of a server, and write what the window shows.

    Raises ImportError without playwright, and its errors.
    """
    playwright = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(_PATIENCE_MS)
        page.goto(address)
        for is_last in (False, True):
            page.locator("#input").fill(QUESTION)
            page.locator("#input").press("Enter")
            page.get_by_text("the answer is complete").wait_for()
            if not is_last:
                page.get_by_role("button", name="New chat").click()
        page.wait_for_timeout(_DRAWN_MS)
        write_picture(page.screenshot(), picture)
        browser.close()


def write_picture(screenshot: bytes, picture: Path) -> None:
    """Write a screenshot as a PNG of few colours, which has a third of its bytes."""
    screen = Image.open(BytesIO(screenshot)).convert("RGB")
    screen.quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", default=Path("examples/bundle"))
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/pictures/chat-page.png"))
    options = parser.parse_args(arguments)
    with Server(command(options.bundle)) as server:
        draw(f"http://127.0.0.1:{server.port}/", options.output)


if __name__ == "__main__":
    main()
