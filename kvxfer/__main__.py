"""``python -m kvxfer``: the console script where it is not on the path."""

from kvxfer.experiment.cli import main

if __name__ == "__main__":
    main()
