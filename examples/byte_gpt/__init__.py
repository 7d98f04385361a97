"""A byte-level GPT that trains on text every machine already has: the source of Python's standard library."""

from examples.byte_gpt.data import ByteText
from examples.byte_gpt.model import ByteGPT

__all__ = ["ByteGPT", "ByteText"]
