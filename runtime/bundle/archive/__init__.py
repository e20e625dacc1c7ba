"""One file that contains a bundle. `pack_bundle` writes it, `unpack_bundle` restores the same bytes; both can resume.

A bundle is unpacked before it runs. Reads of experts at run time do not use this package.
"""

from .pack import Packed, pack_bundle
from .unpack import Unpacked, unpack_bundle

__all__ = ["Packed", "Unpacked", "pack_bundle", "unpack_bundle"]
