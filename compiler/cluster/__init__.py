"""A compile on many machines: work described as values, run by one worker process per node, with Ray in between.

jobs.py says what work is, site.py does it, ray_pool.py is the only file that knows Ray, remote.py and trials.py stand
where a compile on one machine has its reference model, its runtime and its trials. Batches are cut as they are on one
machine and results are put in their order, so that plan and bytes do not depend on who computed what.
"""
