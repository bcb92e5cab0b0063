"""Measure what a map is worth: python evaluate.py pair=toy."""

from kvxfer.experiment.command import evaluate

if __name__ == "__main__":
    evaluate()
