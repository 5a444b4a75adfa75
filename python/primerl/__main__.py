import sys

from primerl.cli import main

if __name__ == "__main__":
    sys.exit(main())
