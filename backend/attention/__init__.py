"""Attention over the paged cache: one file a kernel source, behind one interface."""
