"""Measurements against peers, each in one run on one machine. Not part of the installed package."""
