"""Large offline LLM generation with exact batch speculative decoding."""

import gc
import os

# torch and transformers make a million objects that stay. With the usual thresholds, the collector would walk them
# again and again, for a quarter of the time of their import, in each of a job's processes. Higher thresholds of the
# caller stay as they are.
if 0 < gc.get_threshold()[0] < 10_000:
    gc.set_threshold(10_000, 50, 100)

# torch then puts tensors of 2 MiB or more on huge pages, if Linux offers them, so that the TLB misses less. torch reads
# the variable once, at its first such tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
