"""Cost of rounding a unit, to second order: KL from the Fisher information, with one backward pass per text.

Let z be the logits at the answer tokens, p their softmax, and dz the change of z from a change D of one projection. Up
to higher orders of D, the mean KL is

    1/2 sum over tokens of dz^T (diag p - p p^T) dz / tokens.

Let e be Gaussian. The vector v = (diag sqrt p - p sqrt p^T) e has that matrix as its covariance. Let d be the gradient
of v . z at the outputs of the projection. The sum over tokens is then the mean of

    (sum over the text's tokens of d . D x)^2.

One backward pass gives d for every projection of every expert (gradients.py). D x costs one product per format
(unit_prices.py). No plan is applied, and no unit is measured.
The prediction ignores tokens that later routers send to other experts. In early layers of the example, that effect
doubles the KL.
Source: Optimal Brain Surgeon (second-order cost of a change of weights). The curvature is the Fisher information, as in
New Insights and Perspectives on the Natural Gradient Method, section 9. Gaussian vectors sketch it.
Shapes: A answer tokens, V vocabulary, U units, S formats.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moec.manifests.model import ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec

TEXTS = 384
"""Number of texts over all tasks. With two sketches each, ranks hardly change with more texts."""


def sketch(logits: Tensor, draws: np.random.Generator) -> Tensor:
    """Return a vector per row with covariance diag p - p p^T.

    logits: [A, V].
    draws: normal numbers. Rows in several calls draw the same numbers as rows in one.
    """
    drawn = torch.from_numpy(draws.standard_normal(logits.shape, np.float32))
    probabilities = logits.softmax(-1)
    weighted = probabilities.sqrt() * drawn.to(logits.device)
    return weighted - probabilities * weighted.sum(-1, keepdim=True)


def ranks_well(model: ModelSpec) -> bool:
    """Return whether gradients capture the effect of rounding.

    They do not if a small change of logits changes a router's weights abruptly (sparsemixer). Gradients then predict a
    sixth to a quarter of the measured KL (docs/experiments/2026-11.md, 21: Sensitivity with sparsemixer routers).
    They are not measured for models with an encoder.
    """
    scorings = {layer.experts.router.scoring for layer in model.layers}
    return model.encoder is None and "sparsemixer" not in scorings


def asks_gradients(kind: str, model: ModelSpec) -> bool:
    """Return whether gradients price the units.

    kind: value of `--sensitivity`. `exact` corrects the prices from gradients.
    """
    return kind == "fisher" or (kind != "proxy" and ranks_well(model))


def predictions(
    prices: np.ndarray, model: ModelSpec, specs: Sequence[QuantSpec]
) -> dict[tuple[UnitKey, QuantSpec], float]:
    """Return the predictions by unit and format.

    prices: [U, S] from LayerGradients.run, NaN without a prediction.
    """
    return {
        (unit, spec): float(prices[row, column])
        for row, unit in enumerate(model.unit_keys())
        for column, spec in enumerate(specs)
        if np.isfinite(prices[row, column])
    }
