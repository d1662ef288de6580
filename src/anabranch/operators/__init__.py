"""Kernels: what an operator does to a batch.  Columns in, columns out; state by multi-get and multi-put.

Knows `model`.  Must not know flows, Spark, files or LMDB.
"""
