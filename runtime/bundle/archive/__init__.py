"""One file that contains a bundle. `pack_bundle` writes it, `unpack_bundle` restores the same bytes; both can resume.

A bundle is unpacked before it runs. Reads of experts at run time do not use this package.
"""

from .pack import pack_bundle
from .unpack import unpack_bundle

__all__ = ["pack_bundle", "unpack_bundle"]
