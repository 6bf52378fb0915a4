"""What tests of whole runs on this machine share."""

from tests.runs import fdl

__all__ = ["fdl"]
