"""A plan carried out: output folder, leases, threads, resume.

Imports planning and below.
"""
