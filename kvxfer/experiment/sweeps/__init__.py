"""Sweeps: a grid of jobs that is checked before it runs, and ends in one table, one CSV and one figure."""
