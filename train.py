"""Fit a map from moments: python train.py pair=toy solver=ridge."""

from kvxfer.experiment.command import train

if __name__ == "__main__":
    train()
