"""Live views of running policies in rerun's viewer: camera images, chunks, executed actions and latencies."""

from vla_accel.view.opening import check_view, open_view
from vla_accel.view.view import OFF, View

__all__ = ["OFF", "View", "check_view", "open_view"]
