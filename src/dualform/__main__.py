"""`python -m dualform`: the command line, where the script is not on the path."""

from dualform.cli import main

if __name__ == "__main__":
    main()
