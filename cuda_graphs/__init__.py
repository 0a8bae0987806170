"""A registry of runtime states keyed by any hashable shape: build under a memory budget, look up, swap, report.

Importing this package needs neither torch nor CUDA. `cuda_graphs.cuda` has the backend that measures a CUDA device and
captures graphs, `cuda_graphs.padded` a function captured for several batch sizes.
"""

from cuda_graphs.backend import EagerBackend, Graph, GraphBackend, StateBackend
from cuda_graphs.batch_sizes import prune_batch_sizes
from cuda_graphs.errors import BudgetError, Need, RegistryError, UnknownStateError, format_bytes
from cuda_graphs.parts import Cost, SharedParts
from cuda_graphs.registry import StateRegistry
from cuda_graphs.report import PartReport, RegistryReport, StateReport

__all__ = [
    "BudgetError",
    "Cost",
    "EagerBackend",
    "Graph",
    "GraphBackend",
    "Need",
    "PartReport",
    "RegistryError",
    "RegistryReport",
    "SharedParts",
    "StateBackend",
    "StateRegistry",
    "StateReport",
    "UnknownStateError",
    "format_bytes",
    "prune_batch_sizes",
]
