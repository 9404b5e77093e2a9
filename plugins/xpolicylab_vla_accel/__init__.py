"""A policy folder of XPolicyLab whose model runs on vla_accel's engines, here or behind a policy server."""
