"""A compile on many machines: work described as values, run by one worker process per node, with Ray in between.

jobs: the work. site: what a worker has. ray_pool: the only file that imports Ray. remote: workers in place of this
machine. Batches are divided as on one machine and results are put in their order, so plan and bytes do not depend on
which machine computed what.
"""
