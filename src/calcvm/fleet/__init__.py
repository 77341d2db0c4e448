"""Train many models, of one shape or of many, at once in one heap."""

from calcvm.fleet.fleet import Fleet
from calcvm.fleet.handle import Handle
from calcvm.fleet.results import Results

__all__ = ["Fleet", "Handle", "Results"]
