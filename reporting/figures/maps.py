"""Maps of layers x experts: bits, popularity, sensitivity. The script of the page draws them on a canvas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from moec.manifests.bundle import BundleManifest

from ..text import number, section

_DIGITS = 4
"""Significant digits of a value. The page would be too large with all of them."""


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """One value of each expert, [L][E]. A layer without routed experts is empty.

    title: what it shows.
    unit: unit of the values.
    is_log: whether colours follow the logarithm.
    """

    title: str
    unit: str
    is_log: bool
    values: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Maps:
    """All maps of a bundle, by name, and the experts that are left out, [L][...]."""

    maps: Mapping[str, ExpertMap]
    left_out: Sequence[Sequence[int]]

    def to_plain(self) -> dict[str, Any]:
        """Return the values for the script."""
        return {
            "leftOut": [list(row) for row in self.left_out],
            "maps": {
                name: {
                    "title": expert_map.title,
                    "unit": expert_map.unit,
                    "log": expert_map.is_log,
                    "values": [[rounded(value) for value in row] for row in expert_map.values],
                }
                for name, expert_map in self.maps.items()
            },
        }


def rounded(value: float) -> float:
    """Return a value with the digits that the page has."""
    return float(f"{value:.{_DIGITS}g}")


def maps_of(manifest: BundleManifest, quality: Mapping[str, Any] | None) -> Maps:
    """Return the maps that the bundle has values for. Bits come from the manifest, the others from quality.json."""
    maps = {"bits": ExpertMap("Bits per weight", "bits", False, bits_of(manifest))}
    if quality is not None and quality.get("statistics"):
        popularity = _grid(quality["statistics"]["popularity"])
        maps["popularity"] = ExpertMap("Popularity: share of the layer's routed tokens", "share", True, popularity)
    if quality is not None and (quality.get("sensitivity") or {}).get("experts"):
        experts = quality["sensitivity"]["experts"]
        title = f"Sensitivity: predicted KL if all of the expert had the format {experts['format']}"
        maps["sensitivity"] = ExpertMap(title, "nats", True, _grid(experts["losses"]))
    measured = {} if quality is None else (quality.get("comparison") or {}).get("expert_losses", {})
    for number_of_map, (baseline, losses) in enumerate(measured.items()):
        title = f"Sensitivity: measured rise of the answers' loss, each expert alone lowered ({baseline})"
        maps[f"measured-{number_of_map}"] = ExpertMap(title, "nats per token", False, _grid(losses))
    return Maps(maps, manifest.pruned_experts)


def bits_of(manifest: BundleManifest) -> list[list[float]]:
    """Return stored bits for each weight of every expert, scales included, padding not."""
    model = manifest.model
    rows = [[0.0] * layer.experts.count for layer in model.layers]
    for entry in manifest.experts:
        projections = model.layers[entry.layer].experts.projections
        weights = stored = 0
        for projection in projections:
            shape = model.unit_shape(entry.layer, projection)
            weights += shape[0] * shape[1]
            stored += entry.spec(projection).packed_bytes(*shape)
        rows[entry.layer][entry.expert] = 8 * stored / weights
    return rows


def _grid(rows: Sequence[Sequence[Any]]) -> list[list[float]]:
    return [[number(value) for value in row] for row in rows]


def map_section(maps: Maps) -> str:
    """Return the section with the canvas and its controls. The script fills it."""
    choices = "".join(
        f'<option value="{name}">{escape(expert_map.title)}</option>' for name, expert_map in maps.maps.items()
    )
    return section(
        "maps",
        "Experts of every layer",
        '<div class="controls"><label>Show <select id="map-kind">',
        choices,
        '</select></label><label><input type="checkbox" id="map-sort"> sort each layer by this value</label></div>',
        '<canvas id="map" tabindex="0" role="img" aria-label="Map of layers and experts"></canvas>',
        '<div class="scale"><span id="map-low"></span><div id="map-scale"></div><span id="map-high"></span></div>',
        '<p id="map-value" aria-live="polite">Point at an expert, or press the arrow keys.</p>',
        "<noscript><p>The maps need JavaScript.</p></noscript>",
    )
