"""Run a policy object of lerobot or openpi, as it is in memory, on this package's engines (`vla_accel.attach`)."""

from vla_accel.attachment.attach import Attachment, attach

__all__ = ["Attachment", "attach"]
