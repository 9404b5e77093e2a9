# Reading transformers' own types takes pyright a minute.
from typing import Any

def __getattr__(name: str) -> Any: ...
