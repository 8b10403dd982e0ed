"""Run the real code of conversions in a world that a seed makes: disks, machines, clocks, faults.

scheduler  simulated threads of simulated processes, one at a time, under a virtual clock
machines   what has a clock and a cache of its own, and the processes on it
disk       what processes see of files, and what a power cut leaves of them
system     calls of files, answered by the disk; streams, the files that Python opens
seam       puts all of it in the place of Python's os, io, time and threading
hub        a repository that files are pushed to, and replies that are lost
invariants what must hold at every step
checkpoint what is converted, and what it must become
world      a seed becomes machines, processes and faults, and these a verdict
runs       many seeds, one after the other
mutations  faults of the code that the seeds must find

    PYTHONPATH=tests:tests/support .venv/bin/python -m simulation --seed 7 --trace
"""
