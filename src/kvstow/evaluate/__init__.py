"""Evaluation: what a scheme costs in quality, measured through the quantised cache."""
