"""`python -m lerobot_policy_vla_accel CHECKPOINT FOLDER`: create a folder for --policy.path of lerobot's programs."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lerobot.configs.types import FeatureType, PolicyFeature

from lerobot_policy_vla_accel.configuration_vla_accel import VlaAccelConfig
from lerobot_policy_vla_accel.modeling_vla_accel import check_action_steps, describe
from lerobot_policy_vla_accel.processor_vla_accel import make_vla_accel_pre_post_processors
from vla_accel.cli.options import Argument, Number, read
from vla_accel.config import load_config
from vla_accel.errors import CheckpointError, VlaAccelError
from vla_accel.families.loading import load
from vla_accel.files import user_path


@dataclass(frozen=True)
class Arguments:
    """Create a folder of type vla_accel for lerobot's --policy.path and --pretrained_name_or_path. It names the
    checkpoint and how to run it; weights are not copied."""

    checkpoint: Annotated[str, Argument("CHECKPOINT", positional=True)]
    """A folder, a bundled checkpoint (demo) or a name on the hub."""
    folder: Annotated[Path, Argument("FOLDER", positional=True)]
    """The folder to create; it must not exist."""
    config: str | None = None
    """A configuration by name (native_fp8) or file; by default auto."""
    num_steps: Number = None
    """Denoising steps."""
    lora: str | None = None
    """Folder or hub name of an adapter."""
    n_action_steps: Number = None
    """Actions of a chunk that are executed before the next call."""


def main(words: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 an error was reported."""
    try:
        arguments = read(Arguments, words, "python -m lerobot_policy_vla_accel")
        write(arguments)
    except VlaAccelError as error:
        print(f"lerobot_policy_vla_accel: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.folder}: --policy.path={arguments.folder}")
    return 0


def write(arguments: Arguments) -> None:
    """Write the folder, whole or not at all."""
    if arguments.folder.exists():
        raise CheckpointError(f"{arguments.folder}: expected a new folder, got one that exists")
    settings = load_config(arguments.config).with_steps(arguments.num_steps)
    checkpoint = load(
        arguments.checkpoint, settings if arguments.lora is None else settings.with_lora(arguments.lora), whole=False
    )
    check_action_steps(arguments.n_action_steps, checkpoint)
    preset = checkpoint.processor.preset
    config = VlaAccelConfig(
        input_features=describe(checkpoint.processor),
        output_features={"action": PolicyFeature(FeatureType.ACTION, (preset.action_dim,))},
        checkpoint=_lasting(arguments.checkpoint),
        config=_lasting(arguments.config),
        lora=_lasting(arguments.lora),
        num_steps=arguments.num_steps,
        n_action_steps=arguments.n_action_steps,
        device="cpu",
    )
    before, after = make_vla_accel_pre_post_processors(config)
    # The program that loads the folder chooses the device.
    config.device = None
    arguments.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder.parent, prefix=f".{arguments.folder.name}.") as temporary:
        made = Path(temporary) / "folder"
        for part in (config, before, after):
            part.save_pretrained(made)
        made.rename(arguments.folder)


def _lasting(name: str | None) -> str | None:
    """A path that holds wherever lerobot is started; other names as they are."""
    return name if name is None or not user_path(name).exists() else str(user_path(name).resolve())


if __name__ == "__main__":
    sys.exit(main())
