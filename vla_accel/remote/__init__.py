"""Policies and robots apart: the wire form, and a control loop around a policy that takes its time."""
