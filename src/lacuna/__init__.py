"""Lacuna trains multi-label image classifiers when most labels are missing."""

__version__ = "0.2.0"
