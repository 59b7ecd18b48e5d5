"""`python -m miles.engines.embedded --model-path DIR --port N`: see `options`."""

import sys

from miles.engines.embedded.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
