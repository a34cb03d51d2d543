"""Benchmarks that compute in their own process; `mlxd bench` drives servers instead."""
