"""Bytes on the Hugging Face Hub: listings, range requests, uploads.

Imports storage; huggingface_hub and urllib3.
"""
