"""Every option, declared once.

Imports execution and below, and these where an option is used; nothing that converts.
"""
