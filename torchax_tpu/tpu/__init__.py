"""Google's TPU compiler on any machine: see README.md here."""

from .dry_run import (
    Collective,
    DryRun,
    Memory,
    TopologyError,
    TpuCompileError,
    TpuCompilerMissingError,
    dry_run,
)

__all__ = [
    "Collective",
    "DryRun",
    "Memory",
    "TopologyError",
    "TpuCompileError",
    "TpuCompilerMissingError",
    "dry_run",
]
