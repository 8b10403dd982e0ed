"""python -m fp4convert."""

from fp4convert.cli import main

if __name__ == "__main__":
    main()
