"""`python -m vla_eval_vla_accel --args.checkpoint=CHECKPOINT`: serve vla-eval's benchmarks; its own options."""

from vla_eval.model_servers.serve import run_server

from vla_eval_vla_accel.model_server import VlaAccelModelServer

if __name__ == "__main__":
    run_server(VlaAccelModelServer)
