"""Whether packages are installed, and their versions, without importing them."""

from __future__ import annotations

from importlib import metadata, util


def missing(module: str, distribution: str) -> str | None:
    """A sentence why `module` cannot be imported; None where it is installed."""
    if util.find_spec(module) is not None:
        return None
    return f"{module} is not installed: pip install {distribution} brings it"


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
