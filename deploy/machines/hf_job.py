# /// script
# requires-python = ">=3.11"
# dependencies = ["fp4convert"]
# ///
"""Convert ORG/NAME into ME/NAME on a rented processor; nothing is kept on its disk.

hf jobs uv run --flavor cpu-upgrade --timeout 6h --attempts 3 --secrets HF_TOKEN \
    hf_job.py ORG/NAME ME/NAME-NVFP4 --for vllm --min-sqnr 18

Options after both names are those of `fp4convert quantize`.  An attempt begins anew: the Hub has
what the one before uploaded, and takes it again without a transfer.
"""

import sys

from fp4convert.__main__ import main

source, target, *options = sys.argv[1:]
disk = ["--no-keep", "--disk", "20"]
sys.argv[1:] = ["quantize", source, "-o", "result", "--push-to-hub", target, *disk, *options]
main()
