"""One file to ship a bundle in: `pack_bundle` writes it, `unpack_bundle` gives back the same bytes; both resume.

Expert reads at run time never come through here; a bundle is unpacked before it runs.
"""

from .pack import Packed, pack_bundle
from .unpack import Unpacked, unpack_bundle

__all__ = ["Packed", "Unpacked", "pack_bundle", "unpack_bundle"]
