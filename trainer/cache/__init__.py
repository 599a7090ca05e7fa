"""Activations as per-sample state: what the fixed part of a classifier makes of a sample, computed once and then read.

views.py: one look at every sample, and the address of what was made of it. stream.py: batches of it, filled on the way.
phase_cache.py: what a phase asks. cost.py: how much it takes.
"""
