"""Transports: ways of moving weight bytes, found by name through the entry point group `miles.weight_sync`."""
