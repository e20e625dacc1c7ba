"""Popularity files: JSON of `moec merge-traces`."""

from __future__ import annotations

from moec.manifests.errors import InputError
from moec.manifests.expert_use import ExpertUse, SampledRoutes, encode_use, read_use
from tests.fuzz.targets.scratch import file_of


def target(data: bytes) -> None:
    try:
        use, _ = read_use(file_of("a.popularity", data))
    except InputError:
        return
    for layer, (chosen, offered) in enumerate(zip(use.chosen, use.offered, strict=True)):
        assert sum(chosen) == use.top_k[layer] * use.tokens[layer] or not use.experts[layer]
        assert all(few <= many <= use.tokens[layer] for few, many in zip(chosen, offered, strict=True))


def seeds() -> list[bytes]:
    digest, routes = "ab" * 32, (SampledRoutes(0, bytes([0, 0, 1, 0]), b""),)
    return [encode_use(ExpertUse(digest, (3, 0), (2, 0), 4, (5, 5), ((5, 4, 1), ()), ((5, 5, 2), ()), routes))]
