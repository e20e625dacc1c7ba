"""Rewrite a picture of matplotlib as an SVG file of a tenth of its size that looks the same."""

from __future__ import annotations

import re
from io import BytesIO
from itertools import groupby
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

FONTS = "'DejaVu Sans','Lucida Grande',Verdana,sans-serif"
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_PLACES = ("x", "y", "width", "height", "transform")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_STEP = re.compile(r"([MLQCz])([^MLQCz]*)")
_REFERENCE = re.compile(r'(?:(?<=href="#)|(?<=url\(#))[\w-]+')
_DEFAULTS = (("stroke-dashoffset", "0"), ("text-anchor", "start"))
_LEAST_RUN = 3
"""Elements in a row that share a group if their class is the same."""


def small_svg(drawn: bytes) -> bytes:
    """Return the picture with coordinates in tenths of a point, and without metadata and unused names.

    Equal styles are one class. Lines and bars in a row that look the same are one path.
    """
    root = ElementTree.parse(BytesIO(drawn)).getroot()
    for element in root.iter():
        element.tag, element.tail = element.tag.removeprefix(_SVG), None
        if element.tag not in ("title", "text", "tspan"):
            element.text = None
    root[:] = [child for child in root if child.tag in ("title", "g", "defs")]
    classes: dict[str, str] = {}
    for element in root.iter():
        _shorten(element, classes)
    _inline_ticks(root)
    root[:] = _flat(root)
    style = Element("style")
    style.text = f"svg{{stroke-linejoin:round;font-family:{FONTS}}}"
    used = {name for element in root.iter() for name in element.attrib.get("class", "").split()}
    style.text += "".join(f".{name}{{{rules}}}" for rules, name in classes.items() if name in used)
    root.insert(1, style)
    root.attrib = {"xmlns": _SVG[1:-1], **root.attrib}
    del root.attrib["version"]
    text = ElementTree.tostring(root, "unicode").replace(" />", "/>").replace("<g", "\n<g")
    return (_with_short_names(text) + "\n").encode()


def _shorten(element: Element, classes: dict[str, str]) -> None:
    """Round the places of an element, and replace its style by a class. A path keeps its colour as an attribute."""
    attributes = element.attrib
    if element.tag != "svg":
        for key in _PLACES & attributes.keys():
            attributes[key] = _NUMBER.sub(lambda number: _short(float(number[0])), attributes[key])
    if attributes.get("transform", "").startswith("rotate(0 "):
        del attributes["transform"]
    if "d" in attributes:
        attributes["d"] = _short_path(attributes["d"])
    if _LINK in attributes:
        attributes["href"] = attributes.pop(_LINK)
    rules = list[str]()
    for rule in [rule for rule in attributes.pop("style", "").split("; ") if rule]:
        name, value = rule.split(": ", 1)
        value = re.sub(r"\b0\.", ".", re.sub(r"#(.)\1(.)\2(.)\3$", r"#\1\2\3", value))
        if name == "fill" and value.startswith("#") and element.tag == "path":
            attributes["fill"] = value
        elif name != "font-family" and (name, value) not in _DEFAULTS:
            rules.append(f"{name}:{value}")
    looks = [";".join(rules)] if rules else []
    if "clip-path" in attributes:
        looks.append(f"clip-path:{attributes.pop('clip-path')}")
    if looks:
        attributes["class"] = " ".join(classes.setdefault(look, _name(len(classes))) for look in looks)


def _short(value: float) -> str:
    """Return a coordinate as text."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else re.sub(r"^(-?)0\.", r"\1.", text)


def _short_path(commands: str) -> str:
    """Return a path of M, L, Q, C and z with relative steps, in tenths of a point. Rounding does not add up."""
    text, last, x, y = "", "", 0, 0
    steps = _STEP.findall(commands)
    if len(steps) > 2 and steps[-1] == ("L", steps[0][1]):
        steps[-1] = ("z", "")
    for letter, places in steps:
        numbers = [round(10 * float(number)) for number in places.split()]
        from_x, from_y = (0, 0) if letter == "M" else (x, y)
        values = [number - (from_y if at % 2 else from_x) for at, number in enumerate(numbers)]
        if numbers:
            x, y = numbers[-2:]
        step = letter if letter in "Mz" else letter.lower()
        if step == "l" and 0 in values:
            step, values = ("v", values[1:]) if values[0] == 0 else ("h", values[:1])
        words = " ".join(_short(value / 10) for value in values).replace(" -", "-")
        joins = step == last and step != "M"
        text += (words if words.startswith("-") else f" {words}") if joins else step + words
        last = step
    return text


def _inline_ticks(root: Element) -> None:
    """Replace uses of a mark that is a line upwards or across by that line."""
    marks = {path.attrib["id"]: path.attrib for path in root.iterfind(".//defs/path")}
    for mark in marks.values():
        mark.pop("class", None)
        mark.pop("fill", None)
    for use in root.iter("use"):
        mark = marks[use.attrib["href"][1:]]
        if re.fullmatch(r"M0 0[hv][-.\d]+", mark["d"]):
            use.tag = "path"
            use.attrib = {"class": use.attrib["class"], "d": f"M{use.attrib['x']} {use.attrib['y']}{mark['d'][4:]}"}
            mark["id"] = ""
    for definitions in root.iter("defs"):
        definitions[:] = [child for child in definitions if child.tag in ("path", "clipPath") and child.attrib["id"]]


def _flat(group: Element) -> list[Element]:
    """Return the content of a group without groups that hold no style or place.

    Lines, ticks and labels of an axis do not overlap, and cells of a map have equal edges: sorted, more of them join.
    """
    content = list[Element]()
    for child in group:
        if child.tag not in ("g", "defs"):
            content.append(child)
            continue
        name = child.attrib.pop("id", "")
        if name.startswith("QuadMesh"):
            child[:] = sorted(child, key=lambda cell: cell.attrib.get("fill", ""))
        inner = _flat(child)
        if name.startswith("matplotlib.axis"):
            inner = _joined(sorted(inner, key=lambda element: (element.tag, element.attrib.get("class", ""))))
        if child.tag == "g" and not child.attrib:
            content += inner
        elif inner:
            child[:] = inner
            content.append(child)
    return _joined(content)


def _joined(elements: list[Element]) -> list[Element]:
    """Join paths in a row that look the same, and group other elements in a row with the same class."""
    joined = list[Element]()
    for name, run in groupby(elements, lambda element: element.attrib.get("class")):
        alike = list[Element]()
        for element in run:
            look = {**element.attrib, "d": ""}
            if element.tag == "path" and alike and alike[-1].tag == "path" and look == {**alike[-1].attrib, "d": ""}:
                alike[-1].attrib["d"] += element.attrib["d"]
            else:
                alike.append(element)
        if name and len(alike) >= _LEAST_RUN:
            group = Element("g", {"class": name})
            for element in alike:
                del element.attrib["class"]
            group[:] = alike
            alike = [group]
        joined += alike
    return joined


def _with_short_names(text: str) -> str:
    """Give short names to what is referred to, and none to the rest."""
    names = {name: _name(at) for at, name in enumerate(dict.fromkeys(_REFERENCE.findall(text)))}
    text = _REFERENCE.sub(lambda reference: names[reference[0]], text)
    return re.sub(r' id="([^"]*)"', lambda name: f' id="{names[name[1]]}"' if name[1] in names else "", text)


def _name(number: int) -> str:
    """Return a name of one or two letters."""
    return (chr(ord("a") + number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)
