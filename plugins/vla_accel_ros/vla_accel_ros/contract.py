"""Contracts: the ROS topics that hold a policy's observation and take its actions.

The format is rosetta's: each key of the observation and of the action names one or several sources, each with a channel
(topic, message type, QoS), an alignment in time, the selected fields and operators. Rosetta's older layout, which lists
the keys, is read as well. Sections that only concern recordings are ignored.
Source: https://github.com/iblnkn/rosetta, `doc/reference/contract.md` (and its version of February 2026).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from vla_accel.config.mapping import Checked, Within, from_mapping, read_mapping
from vla_accel.errors import ConfigError, unknown
from vla_accel.files import user_path
from vla_accel_ros.operators import Operator, read_operators

IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
JOINT_STATE, TRAJECTORY = "sensor_msgs/msg/JointState", "trajectory_msgs/msg/JointTrajectory"
ARRAY, ARRAY_FLOAT32 = "std_msgs/msg/Float64MultiArray", "std_msgs/msg/Float32MultiArray"
STRING = "std_msgs/msg/String"
IMAGES = (IMAGE, COMPRESSED)
OBSERVED = (*IMAGES, JOINT_STATE, ARRAY, ARRAY_FLOAT32)
COMMANDED = (TRAJECTORY, ARRAY, JOINT_STATE)
FIELDS = {
    JOINT_STATE: {"position": "position", "velocity": "velocity", "effort": "effort"},
    TRAJECTORY: {
        **{"position": "positions", "velocity": "velocities", "acceleration": "accelerations", "effort": "effort"},
        **{"positions": "positions", "velocities": "velocities", "accelerations": "accelerations"},
    },
}
"""For message types with numbers by joint: prefixes in `select`, and the message's fields."""

_RECORDED = ("rewards", "signals", "info", "complementary_data", "adjunct", "teleop", "recording", "reset")
_NAMES = ("robot_type", "name", "version", "visualization", "timestamp_source")


@dataclass(frozen=True)
class Qos(Checked):
    """Quality of service. The defaults are those of sensors: they fit every publisher."""

    reliability: Literal["reliable", "best_effort"] = "best_effort"
    durability: Literal["volatile", "transient_local"] = "volatile"
    history: Literal["keep_last", "keep_all"] = "keep_last"
    depth: Annotated[int, Within(1)] = 1


@dataclass(frozen=True)
class Channel(Checked):
    """A topic. `safety`: what an action's topic gets when the policy stops: nothing, its last command, or zeros."""

    topic: str
    type: str
    qos: Qos | None = None
    dtype: Literal["float32", "float64", "video"] | None = None
    safety: Literal["none", "hold", "zeros"] = "none"


@dataclass(frozen=True)
class Align(Checked):
    """The time of a message (its stamp or its arrival) and how old it may be: `asof` allows `tolerance_ms`, `drop` one
    control period, `hold` the node's `max_age_s`."""

    strategy: Literal["hold", "asof", "drop"]
    timeline: Literal["header", "receive"]
    tolerance_ms: Annotated[float, Within(0, above=True)] | None = None


@dataclass(frozen=True)
class _Entry:
    """A source as written in the file. `kind` concerns only datasets."""

    channel: Channel
    align: Align
    select: tuple[str, ...] = ()
    apply: tuple[object, ...] = ()
    kind: str = "continuous"


@dataclass(frozen=True)
class Source:
    """One topic under one key. `names`: the selected numbers as (message field, joint), empty for images and arrays."""

    key: str
    channel: Channel
    align: Align
    select: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    operators: tuple[Operator, ...]

    @property
    def is_image(self) -> bool:
        return self.channel.type in IMAGES


@dataclass(frozen=True)
class Contract:
    """A contract. `observations`: the sources of each key, whose numbers are joined; `actions`: consecutive numbers of
    an action; `prompt`: a topic with the instruction; `fps`: the control rate."""

    fps: float
    observations: Mapping[str, tuple[Source, ...]]
    actions: tuple[Source, ...]
    prompt: Channel | None = None
    max_duration_s: float = 0.0

    @property
    def action_dim(self) -> int | None:
        """Numbers of an action; None if the contract leaves it to the policy."""
        widths = [len(source.select) for source in self.actions]
        return sum(widths) if all(widths) else None

    @property
    def motion_dims(self) -> tuple[int, ...] | None:
        """Numbers of an action that are velocities; None if the contract does not say what each number is."""
        fields = [field for source in self.actions for field, _ in source.names]
        if len(fields) != self.action_dim or not {*fields} <= {"position", "positions", "velocity", "velocities"}:
            return None
        return tuple(i for i, field in enumerate(fields) if field.startswith("velocit"))


def load_contract(path: str | Path) -> Contract:
    """Read a contract. Raises ConfigError, which names the file and the key."""
    file = user_path(path)
    content = read_mapping(file)
    try:
        return _read(content)
    except ConfigError as error:
        raise ConfigError(f"contract {file}: {error}") from error


def _read(content: Mapping[str, Any]) -> Contract:
    known = ("fps", "rate_hz", "observations", "actions", "tasks", "max_duration_s", "robot_interface")
    for key in content:
        if key not in (*known, *_RECORDED, *_NAMES) and not str(key).startswith("x-"):
            raise ConfigError(unknown("contract", key, known))
    if (interface := content.get("robot_interface", "ros2")) != "ros2":
        raise ConfigError(f"robot_interface: expected ros2, got {interface!r}")
    observations = _sources(content.get("observations"), "observations", OBSERVED)
    actions = [
        source for sources in _sources(content.get("actions"), "actions", COMMANDED).values() for source in sources
    ]
    if len(actions) > 1 and not all(source.select for source in actions):
        raise ConfigError("actions: expected a select for each of several topics")
    longest = _number(content, "max_duration_s", 0.0)
    return Contract(_rate(content), observations, tuple(actions), _prompt(content.get("tasks")), longest)


def _rate(content: Mapping[str, Any]) -> float:
    key = "rate_hz" if "rate_hz" in content else "fps"
    rate = _number(content, key, 0.0)
    if rate == 0:
        raise ConfigError(f"{key}: expected the control rate in Hz, got {content.get(key)!r}")
    return rate


def _number(content: Mapping[str, Any], key: str, default: float) -> float:
    value = content.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e6:
        raise ConfigError(f"{key}: expected a number of at least 0, got {value!r}")
    return float(value)


def _sources(section: Any, where: str, types: Sequence[str]) -> dict[str, tuple[Source, ...]]:
    if isinstance(section, Sequence) and not isinstance(section, str):
        section = _keyed(section, where)
    if not isinstance(section, Mapping) or not section:
        raise ConfigError(f"{where}: expected the sources of each key, got {section!r:.60}")
    found = {}
    for key, value in section.items():
        entries = value if isinstance(value, list) else [value]
        name = f"{where}.{key}"
        sources = tuple(
            _source(str(key), entry, name if len(entries) == 1 else f"{name}[{i}]", types)
            for i, entry in enumerate(entries)
        )
        if len(sources) > 1 and not all(source.select for source in sources):
            raise ConfigError(f"{name}: expected one image, or a select for each of several topics")
        found[str(key)] = sources
    return found


def _source(key: str, entry: Any, where: str, types: Sequence[str]) -> Source:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected channel and align, got {entry!r:.60}")
    read = from_mapping(_Entry, entry, f"{where}.")
    channel, align = read.channel, read.align
    if channel.type not in types:
        raise ConfigError(unknown(f"{where}.channel.type", channel.type, types))
    image, action = channel.type in IMAGES, types is COMMANDED
    if align.timeline == "header" and channel.type in (ARRAY, ARRAY_FLOAT32) and not action:
        raise ConfigError(f"{where}.align.timeline: expected receive, since {channel.type} has no stamp, got header")
    if (align.strategy == "asof") != (align.tolerance_ms is not None):
        raise ConfigError(f"{where}.align: expected tolerance_ms with strategy asof and no other, got {align}")
    if len(set(read.select)) < len(read.select):
        raise ConfigError(f"{where}.select: expected each name once, got {list(read.select)}")
    if image and read.select:
        raise ConfigError(f"{where}.select: expected none for an image, got {list(read.select)}")
    operators = read_operators(read.apply, f"{where}.apply", image=image, action=action)
    return Source(key, channel, align, read.select, _fields(channel.type, read.select, where, action), operators)


def _fields(kind: str, select: Sequence[str], where: str, action: bool) -> tuple[tuple[str, str], ...]:
    """Split position.JOINT; a name without a field is a position."""
    if kind not in FIELDS:
        return ()
    if not select:
        raise ConfigError(f"{where}.select: expected fields of joints such as [position.JOINT], got none")
    found = []
    for name in select:
        field, _, joint = name.partition(".")
        known = joint and field in FIELDS[kind]
        found.append((FIELDS[kind][field], joint) if known else (FIELDS[kind]["position"], name))
    joints = dict.fromkeys(joint for _, joint in found)
    for field in dict.fromkeys(field for field, _ in found) if action else ():
        if missing := [joint for joint in joints if (field, joint) not in found]:
            raise ConfigError(f"{where}.select: expected {field} of every joint, got none of {', '.join(missing)}")
    return tuple(found)


def _prompt(section: Any) -> Channel | None:
    """The topic of the instruction; rosetta's `tasks` names at most one."""
    if not section:
        return None
    entries = list(section.values()) if isinstance(section, Mapping) else section
    if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], Mapping):
        raise ConfigError(f"tasks: expected one topic, got {section!r:.60}")
    entry = entries[0].get("channel") or {key: entries[0].get(key) for key in ("topic", "type", "qos")}
    channel = from_mapping(Channel, entry, "tasks.channel.")
    if channel.type != STRING:
        raise ConfigError(f"tasks.channel.type: expected {STRING}, got {channel.type}")
    return channel


def _keyed(section: Sequence[Any], where: str) -> dict[str, list[dict[str, Any]]]:
    """Rosetta's older layout, a list of sources with their keys, in the present one."""
    found: dict[str, list[dict[str, Any]]] = {}
    known = ("key", "topic", "type", "qos", "publish", "selector", "image", "align", "dtype", "from_tensor")
    for i, item in enumerate(section):
        place = f"{where}[{i}]"
        if not isinstance(item, Mapping) or "key" not in item:
            raise ConfigError(f"{place}: expected a mapping with a key, got {item!r:.60}")
        for name in item:
            if name not in (*known, "unit_conversion", "safety_behavior", "resample", "kind"):
                raise ConfigError(unknown(place, name, known))
        channel = dict(item["publish"]) if "publish" in item else {k: item.get(k) for k in ("topic", "type", "qos")}
        for name in ("layout", "strategy"):
            channel.pop(name, None)
        channel |= {"safety": item["safety_behavior"]} if "safety_behavior" in item else {}
        channel |= {"dtype": item["dtype"]} if "dtype" in item else {}
        align = dict(item.get("align") or {})
        timeline = align.get("stamp", align.get("timeline", "receive"))
        read_align = {"strategy": align.get("strategy", "hold"), "timeline": timeline}
        if read_align["strategy"] == "asof":
            read_align["tolerance_ms"] = align.get("tol_ms", align.get("tolerance_ms"))
        selector, image = item.get("selector") or {}, item.get("image") or {}
        names, field = selector.get("names") or [], selector.get("field")
        apply: list[Any] = [{"resize": image["resize"]}] if "resize" in image else []
        apply += [item["unit_conversion"]] if item.get("unit_conversion") else []
        apply += (
            [{"clamp": (item.get("from_tensor") or {})["clamp"]}] if "clamp" in (item.get("from_tensor") or {}) else []
        )
        found.setdefault(str(item["key"]), []).append({
            "channel": channel, "align": read_align, "apply": apply,
            "select": [f"{field}.{name}" if field else name for name in names],
        })  # fmt: skip
    return found
