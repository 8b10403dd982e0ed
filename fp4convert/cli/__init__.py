"""The command line: options, what is printed, exit codes.

Imports commands and everything below; typer and rich.
"""
