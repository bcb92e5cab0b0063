"""Collect the moments of a pair: python calibrate.py pair=toy."""

from kvxfer.experiment.command import calibrate

if __name__ == "__main__":
    calibrate()
