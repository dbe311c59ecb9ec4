"""Norms of attention heads: q and k, normalized and rotated, in one launch."""
