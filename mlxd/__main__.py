"""`python -m mlxd` is `mlxd`."""

from mlxd.cli import main

if __name__ == "__main__":
    main()
