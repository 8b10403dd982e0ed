"""Damaged input of every kind, through the real readers: an error of ours, or a fault.

targets.py   what is read, and what counts as a fault
mutation.py  how an input is changed: the same for every way to run
__main__.py  runs: some changes of each seed, one file, or coverage-guided by atheris
corpus/      seeds, a folder for each target; what was found stays among them
"""
