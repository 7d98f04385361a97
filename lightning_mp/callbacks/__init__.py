"""Callbacks that measure a run, with our precision plugin or with any other."""
