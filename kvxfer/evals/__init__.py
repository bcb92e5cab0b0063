"""Evaluations: one question per file, and the statistics, tables and figures that they share."""
