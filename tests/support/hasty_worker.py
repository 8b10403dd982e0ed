"""python hasty_worker.py HOST SKEW COMMAND...: fp4convert on a host of another name and clock,
where a minute lasts a second.

HOST  what the machine calls itself; "" for its own name
SKEW  seconds by which the times of its claims are off
"""

import os
import platform
import sys
import time

from fp4convert.__main__ import main
from fp4convert.execution.leases import Leases

LEASE_SECONDS, BEAT_SECONDS = 1.0, 0.2

host, skew = sys.argv[1], float(sys.argv[2])
sys.argv = ["fp4convert", *sys.argv[3:]]
if host:
    platform.node = lambda: host
if skew:
    utime = os.utime
    os.utime = lambda path: utime(path, (time.time() + skew,) * 2)
Leases.__init__.__defaults__ = (LEASE_SECONDS, BEAT_SECONDS, *Leases.__init__.__defaults__[2:])
main()
