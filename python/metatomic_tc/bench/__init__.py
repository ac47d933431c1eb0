"""Benchmarks that come with the package: ``metatomic-tc bench``."""
