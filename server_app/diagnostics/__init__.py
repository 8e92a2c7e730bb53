"""Measures of local and global models on the same images: similarity, collapse, drift."""
