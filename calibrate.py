"""Collect the moments of a pair: python calibrate.py pair=toy."""

from kvxfer.experiment.cli import calibrate

if __name__ == "__main__":
    calibrate()
