"""Integrations that make unmodified models run this package's kernels. Each is imported only on first use."""

import importlib


def __getattr__(name: str):
    try:
        return importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
