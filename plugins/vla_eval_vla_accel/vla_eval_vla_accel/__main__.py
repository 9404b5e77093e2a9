"""`python -m vla_eval_vla_accel --args.checkpoint=CHECKPOINT`: serve vla-eval's benchmarks; its own options."""

import sys

from vla_eval.model_servers.serve import run_server

from vla_accel.errors import VlaAccelError
from vla_eval_vla_accel.model_server import VlaAccelModelServer

if __name__ == "__main__":
    try:
        run_server(VlaAccelModelServer)
    except VlaAccelError as error:
        sys.exit(f"vla_eval_vla_accel: {error}")
