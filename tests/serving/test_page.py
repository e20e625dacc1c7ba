"""The chat page in a browser: what a model writes stays text, nothing leaves the machine, the keyboard is enough.

Tests with a browser need `make page-driver` and Debian's chromium. Without them only the first two tests run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moec.runtime import Engine
from tests.page_driver import page_driver

from .live_server import LiveServer
from .page_server import PAGE, Script, page_server

PATIENCE_MS = 60_000
pytestmark = pytest.mark.gate("G16")
ELEMENTS = {
    *("A", "BLOCKQUOTE", "BUTTON", "CODE", "DEL", "DIV", "EM", "H2", "H3", "H4", "HR", "LI", "OL", "P", "PRE", "SPAN"),
    *("STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"),
}
ATTRIBUTES = {"class", "href", "rel", "start", "tabindex", "target", "title", "type"}
HOSTILE = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<svg onload=window.pwned=1><iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "[click](javascript:window.pwned=1) [b](JaVaScRiPt:alert(1)) [d](vbscript:x)",
    "[c](data:text/html,<script>1</script>) <a href='javascript:window.pwned=1'>x</a>",
    "[e](\tjavascript:alert(1)) [f](&#106;avascript:alert(1)) [g](//example.invalid/x) [h](file:///etc/passwd)",
    "![picture](http://example.invalid/track.png) ![p](data:image/svg+xml;base64,AAAA)",
    '[title](https://example.invalid "onmouseover=alert(1)") [quote](https://example.invalid/"onclick="alert(1))',
    '```html"><script>window.pwned=1</script>\n</code></pre><img src=x onerror=window.pwned=1>\n```',
    "| <b>a</b> | b |\n|---|---|\n| <img src=x onerror=window.pwned=1> | [x](javascript:1) |",
    "# <style>*{display:none}</style>\n> - 1. > # <form action=http://example.invalid><input name=a></form>",
    "</div></article><base href=http://example.invalid/><meta http-equiv=refresh content='0;url=http://example.invalid'>",
    "**bold _em ~~del `code** open_ marks~~ [ link ]( ![ ](",
    "\u202egnp.exe\u2066 \x00\x1b[31m \ud83d\ude00 \u0000",
)
LONG = (
    "*a",
    "**",
    "[",
    "![a](",
    "`",
    "`a` ",
    "_ _",
    "> ",
    "- ",
    "  - a\n",
    "|-|\n",
    "# ",
    "a\n",
    "~~~\n",
    "\\*",
    " ",
    "1. ",
)


def test_the_files_are_small_and_name_nothing_outside() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}
    scripts = {name: text for name, text in files.items() if name.endswith(".js")}
    assert set(files) - set(scripts) == {"index.html", "chat.css"}
    assert sum(len(text.encode()) for text in files.values()) < 100_000
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", files["index.html"]) == ["data:,", "chat.css", "chat.js", "#input"]
    assert not re.search(r"<script(?! type=\"module\" src)|<style|\son\w+=|\sstyle=", files["index.html"])
    assert not re.search(r"url\(|@import", files["chat.css"])
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "Function(")
    for name, text in scripts.items():
        assert [word for word in forbidden if word in text] == [], name
        assert re.findall(r"\"(?:https?:)?//[^\"]*\"|import\(", text) == [], name


def test_each_script_is_imported_and_has_what_is_imported() -> None:
    scripts = {path.name: path.read_text(encoding="utf-8") for path in PAGE.glob("*.js")}
    imported = {"chat.js"}
    for text in scripts.values():
        for names, source in re.findall(r"^import \{ ([^}]*) \} from \"\./([^\"]*)\";$", text, re.MULTILINE):
            imported.add(source)
            for name in names.split(", "):
                declared = rf"^export (?:async )?(?:const|let|function) {name}\b"
                assert re.search(declared, scripts[source], re.MULTILINE), (source, name)
                assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} of {source} is not used"
    assert imported == set(scripts)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, without a window."""
    playwright, chromium = page_driver()
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


class Watched:
    """A page in the browser. At its end nothing was reported on the console, and all requests went to its server."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        self.context.set_default_timeout(PATIENCE_MS)
        self.page, self._address = self.context.new_page(), address
        self.told, self.requests = list[str](), list[str]()
        self.page.on("console", lambda message: self.told.append(message.text))
        self.page.on("pageerror", lambda error: self.told.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.told.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        told = [text for text in self.told if "Failed to load resource" not in text]  # of an answer that is refused
        outside = [url for url in self.requests if not url.startswith((self._address, "data:"))]
        self.context.close()
        if kind is None:
            assert told == [] and outside == []

    def ask(self, text: str) -> None:
        """Type a message and wait for the end of the answer."""
        before = self.page.locator(".counts").count()
        self.page.locator("#input").press_sequentially(text)
        self.page.keyboard.press("Enter")
        self.page.locator(".counts").nth(before).wait_for(state="attached")


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script, browser: Any) -> Iterator[str]:
    """The page with the answers of `script`."""
    with page_server(script) as found:
        yield found


def check_harmless(page: Any) -> None:
    """Check that answers have only the elements and attributes of the renderer, and only harmless links."""
    found = page.evaluate(
        """() => [...document.querySelectorAll("#log .markdown *")].map(each =>
            [each.tagName, [...each.attributes].map(own => own.name), each.getAttribute("href")])"""
    )
    for name, attributes, href in found:
        assert name in ELEMENTS and set(attributes) <= ATTRIBUTES, (name, attributes)
        assert href is None or re.match(r"https?://|mailto:", href), href
    assert page.evaluate("() => window.pwned === undefined && document.querySelectorAll('base').length === 0")


def test_hostile_answers_stay_text(browser: Any, script: Script, address: str) -> None:
    with Watched(browser, address) as watched:
        for answer in (*HOSTILE, "\n\n".join(HOSTILE), " ".join(HOSTILE)):
            script.answer = answer
            watched.ask("x")
            check_harmless(watched.page)
        shown = watched.page.locator("#log .markdown").nth(1).text_content()
        assert shown == HOSTILE[1]
        links = watched.page.locator("#log .markdown", has_text="quote").first.locator("a")
        assert links.first.get_attribute("rel") == "noopener noreferrer nofollow"


def test_a_hostile_message_model_and_mode_stay_text(browser: Any, script: Script, address: str) -> None:
    script.mode = "<img src=x onerror=window.pwned=1> LOSSY <b>x</b>"
    with Watched(browser, address) as watched:
        watched.ask(HOSTILE[1])
        assert watched.page.locator("article.user .text").text_content() == HOSTILE[1]
        assert watched.page.locator("#mode").text_content() == f"mode: {script.mode}"
        assert watched.page.locator("#mode strong").all_text_contents() == ["LOSSY"]
        assert watched.page.locator("img").count() == 0


def test_long_answers_of_marks_are_shown(browser: Any, script: Script, address: str) -> None:
    """A renderer whose time grows with the square of the text would not come to the end of these."""
    with Watched(browser, address) as watched:
        for part in LONG:
            script.answer = part * (10_000 // len(part)) + "\n\nthe end"
            watched.ask("x")
            assert "the end" in watched.page.locator("#log .markdown").text_content(), part
            check_harmless(watched.page)
            watched.page.get_by_role("button", name="New chat").click()


def test_a_table_that_is_none_takes_no_longer_than_other_text(browser: Any, script: Script, address: str) -> None:
    """The second line of a table was searched for in a time that grew with the square of its spaces."""
    with Watched(browser, address) as watched:

        def shown_s(line: str) -> float:
            script.answer = f"|\n{line}\n\n" * 100 + "the end"
            began_s = time.perf_counter()
            watched.ask("x")
            return time.perf_counter() - began_s

        plain, hostile = "b" * 3900, " " * 3900 + "-x"
        assert min(shown_s(hostile) for _ in range(2)) < 8 * min(shown_s(plain) for _ in range(2))


def test_markdown(browser: Any, script: Script, address: str) -> None:
    script.answer = (
        "# Title\n\nA **bold** and *slanted* `a*b*c` with 2 * 3 and snake_case_name.\n\n1. one\n   - inner\n2. two\n\n"
        "> said\n\n```python\nx = '<b>'\n\ny\n```\n\n| a | b |\n|---|:-:|\n| 1 | ~~2~~ |\n\n[l](https://example.invalid/a)"
    )
    with Watched(browser, address) as watched:
        watched.ask("x")
        page = watched.page
        texts = {
            "h2": ["Title"], "strong": ["bold"], "em": ["slanted"], "p code": ["a*b*c"], "del": ["2"], "a": ["l"],
            "ol > li > ul > li": ["inner"], "blockquote": ["said"], "pre": ["x = '<b>'\n\ny"], "th": ["a", "b"],
            "td": ["1", "2"],
        }  # fmt: skip
        for selector, expected in texts.items():
            assert page.locator(f"#log .markdown {selector}").all_text_contents() == expected, selector
        assert "2 * 3 and snake_case_name." in page.locator("#log .markdown").text_content()


def test_a_conversation_by_keyboard(browser: Any, script: Script, address: str) -> None:
    with Watched(browser, address) as watched:
        page = watched.page
        watched.ask("first")
        assert page.locator("#input").evaluate("each => each === document.activeElement")
        script.answer = "another"
        page.get_by_role("button", name="Regenerate").press("Enter")
        page.locator("#log .markdown", has_text="another").wait_for()
        watched.ask("second")
        page.get_by_role("button", name="Edit").first.press("Enter")
        page.keyboard.press("ControlOrMeta+a")
        page.keyboard.type("changed")
        page.keyboard.press("Enter")
        page.locator("article.user .text", has_text="changed").wait_for()
        page.locator(".counts").wait_for()
        said = [[each["content"] for each in body["messages"]] for body in script.asked]
        assert said == [["first"], ["first"], ["first", "another", "second"], ["changed"]]
        page.keyboard.press("Control+Shift+O")
        assert page.locator("article").count() == 0


def test_escape_stops_an_answer(browser: Any, script: Script, address: str) -> None:
    script.is_held = True
    with Watched(browser, address) as watched:
        watched.page.keyboard.type("x\n")
        watched.page.locator("#log .markdown", has_text="an answer").wait_for()
        watched.page.keyboard.press("Escape")
        watched.page.locator(".counts", has_text="stopped").wait_for()
        assert script.ended.wait(PATIENCE_MS / 1000), "the request goes on"
        script.is_held = False
        watched.ask("y")
        assert [each["content"] for each in script.asked[-1]["messages"]] == ["x", "an answer", "y"]


def test_the_place_in_the_queue_is_told(browser: Any, script: Script, address: str) -> None:
    script.comment, script.answer, script.is_held = "queue 3", "", True
    with Watched(browser, address) as watched:
        watched.page.keyboard.type("x\n")
        watched.page.locator("#status", has_text="place 3 in the queue").wait_for()
        watched.page.keyboard.press("Escape")
        watched.page.locator(".counts", has_text="stopped").wait_for()


def test_settings_and_the_system_prompt_are_sent(browser: Any, script: Script, address: str) -> None:
    with Watched(browser, address) as watched:
        watched.page.locator("#settings summary").press("Enter")
        shown = [watched.page.get_attribute(f"#{name}", "placeholder") for name in ("temperature", "top_p", "top_k")]
        assert shown == ["0.6", "0.95", "all"]
        for name, value in (("system", "be brief"), ("temperature", "0.5"), ("top_k", "3"), ("max_tokens", "9")):
            watched.page.locator(f"#{name}").fill(value)
        watched.ask("x")
        (body,) = script.asked
        assert body["messages"][0] == {"role": "system", "content": "be brief"} and body["stream"] is True
        assert (body["temperature"], body["top_k"], body["max_tokens"]) == (0.5, 3, 9) and "seed" not in body
        watched.page.reload()
        watched.page.locator("article.user").wait_for()
        assert watched.page.locator("#temperature").input_value() == "0.5", "a reload keeps the conversation"


def test_a_bundle_without_a_template_continues_text(browser: Any, script: Script, address: str) -> None:
    script.has_template = False
    with Watched(browser, address) as watched:
        watched.page.get_by_text("no chat template").wait_for()
        watched.ask("one")
        watched.ask("two")
        assert [body["prompt"] for body in script.asked] == ["one", "onean answer\ntwo"]
        assert watched.page.locator("#system").is_disabled()


def test_a_refusal_is_told(browser: Any, script: Script, address: str) -> None:
    script.refusal = 429, {"error": {"message": "<b>the queue is full</b>"}}
    with Watched(browser, address) as watched:
        watched.ask("x")
        assert watched.page.locator(".problem").text_content() == "<b>the queue is full</b> (try again in 3 s)"


def test_figures_and_the_map(browser: Any, script: Script, address: str) -> None:
    with Watched(browser, address) as watched:
        page = watched.page
        page.locator("#speed", has_text="7.5 tokens/s").wait_for()
        figures = {
            "ttft": "1.50 s", "hits": "75.0 %", "read": "3.25 MiB", "waiting": "50.0 %",
            "memory": "1.00 GiB of 2.00 GiB", "queue": "1 running, 2 waiting",
        }  # fmt: skip
        assert {name: page.locator(f"#{name}").text_content() for name in figures} == figures
        colours = page.evaluate(
            """() => {
              const map = document.getElementById("map"), left = 26;
              const wide = (map.width - left) / 3, high = map.height / 2;
              const all = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
              return [0, 1].flatMap(row => [0, 1, 2].map(at => {
                const x = Math.floor(left + (at + 0.25) * wide), y = Math.floor((row + 0.5) * high);
                return [...all.slice(4 * (y * map.width + x), 4 * (y * map.width + x) + 3)];
              }));
            }"""
        )
        variables = ("absent", "resident", "hit", "miss", "ahead", "out")
        expected = page.evaluate(
            """names => names.map(name => {
              const text = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
              return [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16)); })""",
            list(variables),
        )
        assert colours == expected
        page.locator("#map").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowRight")
        told = "layer 1, expert 1: read ahead, 8.00 bits per weight, used by 10.0 % of the tokens of calibration"
        assert page.locator("#told").text_content() == told
        page.locator("input[value=bits]").check()
        assert page.locator("#legend").text_content() == "2.008.00 bits"


def test_the_speed_of_the_last_answer_stays(browser: Any, script: Script, address: str) -> None:
    """The feed tells the mean of a second, which falls after the end of an answer."""
    with Watched(browser, address) as watched:
        watched.page.locator("#speed", has_text="7.5 tokens/s").wait_for()
        script.figures = {"running": 0, "waiting": 0, "tokens_per_s": 0.1, "number": 5}
        watched.page.locator("#queue", has_text="idle").wait_for()
        watched.ask("x")
        assert watched.page.locator("#speed").text_content() == "12.5 tokens/s"
        watched.page.wait_for_timeout(300)
        assert watched.page.locator("#speed").text_content() == "12.5 tokens/s"


@pytest.mark.parametrize("width", [1200, 390, 320])
def test_nothing_is_wider_than_the_window(browser: Any, script: Script, address: str, width: int) -> None:
    script.answer = "a" * 500 + "\n\n```\n" + "b" * 500 + "\n```\n\n" + "|" + "cell|" * 40 + "\n|" + "-|" * 40
    with Watched(browser, address, viewport={"width": width, "height": 800}) as watched:
        watched.ask("y" * 200)
        for name in ("experts", "settings"):
            watched.page.locator(f"#{name}").evaluate("each => { each.open = true; }")
        assert watched.page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_the_page_talks_to_the_server(browser: Any, server: LiveServer, engine: Engine) -> None:
    with Watched(browser, f"http://127.0.0.1:{server.port}/") as watched:
        page = watched.page
        page.locator("#mode", has_text="streaming, exact").wait_for()
        page.locator("#settings summary").press("Enter")
        page.locator("#temperature").fill("0")
        page.locator("#max_tokens").fill("5")
        watched.ask("hello")
        body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 5}
        expected = server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
        assert page.evaluate("() => JSON.parse(sessionStorage.moec).turns[1].content") == expected
        page.locator("#memory", has_text="iB").wait_for()
        assert "tokens" in page.locator(".counts").text_content()
