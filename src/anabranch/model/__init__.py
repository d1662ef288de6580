"""Values that every other package speaks of: ids, hashes, layouts, Z-set batches, row encoding.

Knows nobody but `anabranch.errors`.
"""
