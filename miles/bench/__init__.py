"""Measurements that a person can repeat with one command each."""
