"""`attach`: replace a policy's forward pass by this package's engines, on the weights that the policy has loaded.

The first call runs both: the policy answers as before, its weights move to the host, the engines are built from them,
and their answer to the same observation and noise is compared with the policy's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_accel.attachment.calls import Call, Reader
from vla_accel.attachment.noise import Draws, RecordedNoise
from vla_accel.config import PolicyConfig, load_config
from vla_accel.errors import ConfigError, EngineError, VlaAccelError
from vla_accel.machine import resolve_device
from vla_accel.policy import OptimizedPolicy

LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.1}
"""Largest `Attachment.difference` of the first answer, by the precision of the engines."""
_PREPARED = {"groot": "GrootReader", "xvla": "XvlaReader", "molmoact2": "MolmoAct2Reader"}
"""Readers of policies whose processors make the model's inputs, in the module of the policy's name."""
_log = logging.getLogger("vla_accel.attach")


class Attachment:
    """A policy that runs on this package's engines, or a note of why it does not.

    Attributes:
        policy: The policy.
        reason: Why the policy computes its actions itself; None while it is attached.
        engine: The engines; None until the first call.
        difference: Root mean square of the difference between the first answer and the policy's, in standard deviations
            of the policy's; None until the first call.
    """

    def __init__(self, policy: nn.Module, limit: float | None) -> None:
        self.policy = policy
        self.reason: str | None = None
        self.engine: OptimizedPolicy | None = None
        self.difference: float | None = None
        self._limit = limit
        self._reader: Reader | None = None
        self._draws = Draws()
        self._like: Tensor | None = None
        self._device = torch.device("cpu")
        self._original: Callable[..., Any] = getattr(policy, "forward", policy)
        self._shadowed: dict[str, Any] = {}

    @property
    def active(self) -> bool:
        """Whether calls of the policy run on the engines, or will after the first one."""
        return self._reader is not None

    def detach(self) -> None:
        """Restore the policy: its own forward pass, and its weights on their device."""
        reader, self._reader, self.engine = self._reader, None, None
        if reader is not None:
            del vars(reader.owner)[reader.method]
            vars(reader.owner).update(self._shadowed)
            self._move(self._device)
            self.reason = "detached"

    def install(self, reader: Reader) -> None:
        """Replace the policy's method."""
        self._reader, self._original = reader, getattr(reader.owner, reader.method)
        # A method that the instance itself has, as one wrapped by torch.compile.
        self._shadowed = {name: value for name, value in vars(reader.owner).items() if name == reader.method}

        @functools.wraps(self._original)
        @torch.compiler.disable
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        run.attachment = self  # type: ignore[attr-defined]
        setattr(reader.owner, reader.method, run)

    def fall_back(self, why: object) -> None:
        """Restore the policy, with one warning."""
        self.detach()
        self.reason = str(why)
        _log.warning("%s is not accelerated: %s", type(self.policy).__name__, why)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        reader = self._reader
        assert reader is not None
        if self.engine is None:
            return self._first(reader, *args, **kwargs)
        try:
            call = reader.call(*args, **kwargs)
        except ConfigError as error:
            self.fall_back(error)
            return self._original(*args, **kwargs)
        noise = self._draws.again(len(call.observations)).noise() if call.noise is None else call.noise
        return self._answer(self.engine, call, noise)

    def _first(self, reader: Reader, *args: Any, **kwargs: Any) -> Any:
        """Answer with the policy itself, build the engines and compare their answer."""
        # An error must leave the policy at work; one that it raises itself passes.
        try:
            _check_device(self.policy, reader.settings)  # it may have moved since
            call = reader.call(*args, **kwargs)
            sizes, family = reader.checkpoint.model.config, reader.checkpoint.family
            shape, fixed = (sizes.action_horizon, sizes.action_dim), family.noise(sizes) is not None
            if reader.takes_noise and call.noise is None:
                device = next(self.policy.parameters()).device
                noise = torch.randn(len(call.observations), *shape, device=device)
                call = replace(call, noise=noise)
                args, kwargs = _with_noise(self._original, args, kwargs, noise)
        except Exception as error:
            return self._failed(error, lambda: self._original(*args, **kwargs))
        with RecordedNoise(shape, uniform=family.uniform_noise) as recorded:
            expected: Tensor = self._original(*args, **kwargs)
        try:
            draws = recorded.draws if call.noise is None else Draws((call.noise,), shape)
            self._draws, self._like = Draws() if fixed else draws, expected
            self._release()
            engine, noise = self._built(reader, call), self._draws.noise()
            if noise is not None and noise.shape[1:] != engine.noise_shape:
                raise EngineError(f"noise: expected {engine.noise_shape} of each observation, got {noise.shape[1:]}")
            ours = self._answer(engine, call, noise)
            self._compare(ours, expected, engine)
        except Exception as error:
            return self._failed(error, lambda: expected)
        self.engine = engine
        return ours

    def _failed(self, error: Exception, answer: Callable[[], Any]) -> Any:
        """Restore the policy, with one warning, and return its answer."""
        _log.debug("the error", exc_info=error)
        self.fall_back(error if isinstance(error, VlaAccelError) else f"{type(error).__name__}: {error}")
        return answer()

    def _built(self, reader: Reader, call: Call) -> OptimizedPolicy:
        settings = replace(reader.settings, device=str(self._device))
        with reader.checkpoint.progress(), torch.inference_mode(False), torch.no_grad():
            engine = OptimizedPolicy(reader.checkpoint, settings)
            if engine.device.type != "cpu":
                engine.warm_up(call.observations[0])
        return engine

    def _answer(self, engine: OptimizedPolicy, call: Call, noise: Tensor | None) -> Tensor:
        count, like = len(call.observations), self._like
        assert like is not None
        chunks = None
        if call.prev_chunk is not None:
            chunk = call.prev_chunk.float().cpu().numpy()
            chunks = list(chunk) if chunk.ndim == 3 else [chunk] * count
        results = engine.infer_batch(
            call.observations,
            noise=None if noise is None else noise.float().cpu().numpy(),
            prev_chunks=chunks,
            inference_delays=None if chunks is None else [call.delay] * count,
        )
        actions = np.stack([result["actions"] for result in results])
        _, rows, columns = like.shape
        if actions.shape[1] < rows or actions.shape[2] < columns:
            raise EngineError(f"actions: expected {(rows, columns)}, got {actions.shape[1:]}")
        # The policy may return only the actions that it executes, and the numbers that its robot has.
        return torch.from_numpy(actions[:, :rows, :columns]).to(like.device, like.dtype)

    def _compare(self, ours: Tensor, expected: Tensor, engine: OptimizedPolicy) -> None:
        error, scale = (ours - expected).float(), expected.float()
        deviation = float((scale - scale.mean()).square().mean().sqrt())
        self.difference = float(error.square().mean().sqrt()) / max(deviation, 1e-6)
        limit = self._limit if self._limit is not None else LIMITS[engine.model.dtype]
        text = f"first answer: difference {self.difference:.2g} of the standard deviation of the policy's actions"
        if not self.difference <= limit:
            raise EngineError(f"{text}, expected at most {limit:g}")
        engines = ", ".join(f"{entry['component']} {entry['used']}" for entry in engine.ledger.as_list())
        _log.info("%s runs on vla_accel (%s); %s", type(self.policy).__name__, engines, text)

    def _release(self) -> None:
        """Move the policy's weights to the host."""
        self._device = next(self.policy.parameters()).device
        self._move("cpu")

    def _move(self, device: str | torch.device) -> None:
        """Move the policy's weights, unless they are on the host alone."""
        if self._device.type != "cpu":
            # lerobot's programs call a policy in inference mode, where moved weights could never be trained again.
            with torch.inference_mode(False):
                self.policy.to(device)
            torch.cuda.empty_cache()


def _with_noise(function: Callable[..., Any], args: Any, kwargs: Any, noise: Tensor) -> tuple[Any, Any]:
    """Return the arguments of a call with `noise` among them."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    if "noise" not in bound.signature.parameters:
        return args, {**kwargs, "noise": noise}
    bound.arguments["noise"] = noise
    return bound.args, bound.kwargs


def attach(
    policy: Any,
    config: PolicyConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    preprocessor: Any = None,
    limit: float | None = None,
) -> Attachment:
    """Run a policy of lerobot, or openpi's `PI0Pytorch`, on this package's engines.

    The engines are built in the first call. A policy that this package cannot run stays as it is, with one warning.

    Args:
        policy: The policy, with its weights. Attach after its settings and weights are final.
        config: As in `OptimizedPolicy.from_pretrained`. Its `device` may only be the policy's.
        preprocessor: lerobot's, for a policy whose images it normalizes by statistics (ACT, Diffusion Policy). Without
            one, the statistics are read from the folder that `policy.config.pretrained_path` names.
        limit: The largest `Attachment.difference` with which the engines are used; None: as in `LIMITS`.
    """
    made = Attachment(policy, limit)
    try:
        reader = _reader_of(policy, load_config(config), preprocessor)
        _check_device(policy, reader.settings)
        known = getattr(getattr(reader.owner, reader.method), "attachment", None)
        if known is not None:
            return known
        made.install(reader)
    except VlaAccelError as error:
        made.fall_back(error)
    return made


def _check_device(policy: nn.Module, settings: PolicyConfig) -> None:
    """Raise ConfigError if the settings name another device than that of the policy."""
    there, named = next(policy.parameters()).device, settings.device
    if named != "auto":
        device = resolve_device(named)
        if device.type != there.type or device.index not in (None, there.index):
            raise ConfigError(f"device: expected auto or the policy's {there}, got {named}")


def _reader_of(policy: Any, settings: PolicyConfig, preprocessor: Any) -> Reader:
    if hasattr(policy, "predict_action_chunk"):
        name = getattr(policy, "name", None)
        if name in _PREPARED:
            module = importlib.import_module(f"vla_accel.attachment.{name}")
            return getattr(module, _PREPARED[name])(policy, settings)
        from vla_accel.attachment.lerobot import LerobotReader

        return LerobotReader(policy, settings, preprocessor)
    if type(policy).__name__ == "PI0Pytorch":
        from vla_accel.attachment.openpi import OpenpiReader

        return OpenpiReader(policy, settings)
    raise ConfigError(f"attach: expected a policy of lerobot, or openpi's PI0Pytorch, got {type(policy).__name__}")
