"""lerobot's async policy server, which otherwise knows only lerobot's own policies.

    python -m lerobot_policy_vla_accel.policy_server --host=127.0.0.1 --port=8080

takes the options of `lerobot.async_inference.policy_server`; its robot client is used unchanged.
"""

from __future__ import annotations

from lerobot.async_inference import policy_server
from lerobot.utils.import_utils import register_third_party_plugins

from lerobot_policy_vla_accel.configuration_vla_accel import VlaAccelConfig


def main() -> None:
    """Serve until stopped."""
    register_third_party_plugins()
    # The one list that the server compares a client's policy type with.
    policy_server.SUPPORTED_POLICIES.append(VlaAccelConfig.get_choice_name(VlaAccelConfig))
    policy_server.serve()


if __name__ == "__main__":
    main()
