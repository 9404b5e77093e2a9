"""`python -m vla_accel` is `vla-accel`."""

import sys

from vla_accel.cli import main

sys.exit(main())
