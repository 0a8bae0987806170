"""The DRIFT memory, torch only. It arrives with its own change; until then this package is importable and empty."""
