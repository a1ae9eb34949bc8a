"""A key-value cache of which some layers lie on disk: read before a layer computes, written back after it.

`page_file` keeps the pages and knows their checksums; `partition` cuts a step into parts whose pages fit a buffer;
`ring` fills buffers ahead of the computing and writes back behind it; `cache` is what a decoder sees of all this.
"""

from inference.cache.spilled.cache import SpilledCache
from inference.cache.spilled.sizes import READERS, spilled_disk_bytes, spilled_memory_bytes

__all__ = ["READERS", "SpilledCache", "spilled_disk_bytes", "spilled_memory_bytes"]
