"""Run the real code of conversions in a world that a seed makes: disks, machines, clocks, faults.

scheduler  simulated threads of simulated processes, one at a time, under a virtual clock
disk       what processes see of files, and what a power cut leaves of them
system     the calls of Python's os, io, time and threading, answered by the two above
hub        a repository that files are pushed to, and replies that are lost
invariants what must hold at every step
world      a seed becomes machines, processes and faults, and these a verdict
mutations  faults of the code that the seeds must find

    PYTHONPATH=tests/support .venv/bin/python -m simulation --seed 7 --trace
"""
