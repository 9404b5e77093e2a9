"""What the package's pictures carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vla_accel.images.picture import PARAMETERS


def read_parameters(path: Path) -> dict[str, Any]:
    """What `save_png` put into a file's metadata."""
    from PIL import Image

    with Image.open(path) as image:
        return json.loads(image.info[PARAMETERS])
