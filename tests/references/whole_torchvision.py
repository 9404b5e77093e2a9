"""Import this module before `lerobot_frame` where a policy needs torchvision's models.

A torchvision for another build of torch lacks its operators and cannot be imported; its models use none of them, so
empty ones are declared in their place.
"""

from __future__ import annotations

import re
import sys

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")
while "torchvision" not in sys.modules:
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        missing = re.search(r"torchvision::(\w+)", str(error))
        assert missing is not None, error
        _library.define(f"{missing[1]}(Tensor x) -> Tensor")
        for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[module]
