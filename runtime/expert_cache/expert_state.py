"""States of an expert in a cache. The bytes of all states but ABSENT count against the capacity."""

ABSENT, QUEUED, LOADING, RESIDENT = range(4)
