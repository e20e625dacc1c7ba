"""One file to ship a bundle in: `pack` writes it, `unpack` gives back the same bytes and goes on where it was stopped.

Expert reads at run time never come through here; a bundle is unpacked before it runs.
"""

from .pack import Packed, pack
from .unpack import Unpacked, unpack

__all__ = ["Packed", "Unpacked", "pack", "unpack"]
