"""Figures of rows of results, one file per kind; each is a function of rows to a `Figure`.

They need the extra ``eval``, and neither a model nor a screen.
"""
