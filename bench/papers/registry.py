"""All figures, in the order of the pages, and what is not measured."""

from __future__ import annotations

from .edgemoe import paths, sensitivity
from .figure import Figure, NotMeasured
from .hobbit import routers
from .twiddler import popularity

FIGURES: tuple[Figure, ...] = (
    *sensitivity.FIGURES,
    *paths.FIGURES,
    *routers.FIGURES,
    *popularity.FIGURES,
)

NO_GPU = "It needs a GPU for minutes to hours, which this machine does not have."
NOT_MEASURED: tuple[NotMeasured, ...] = ()
