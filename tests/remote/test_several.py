"""Several observations in one request, and several policies behind one endpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from websockets.sync.client import connect

from tests.support.openpi_wire import openpi_pack, openpi_unpack
from tests.support.server_support import EchoPolicy, GuidedPolicy, MixingPolicy, local, metric, observation, scaled
from vla_accel.cli.asked.servers import Serve
from vla_accel.cli.serve import Load, loader
from vla_accel.client import PolicyClient
from vla_accel.errors import ConfigError, ObservationError, ServerError
from vla_accel.remote import wire
from vla_accel.server import Shelf, background

LOCAL = local()


# -- several observations ----------------------------------------------------------------------------------------------


def test_a_list_of_observations_is_answered_by_a_list_on_openpis_wire() -> None:
    policy = EchoPolicy()
    with background(policy, local(max_batch=4)) as server:
        with connect(server.address, compression=None) as client:
            client.recv()
            client.send(openpi_pack({"batch": [observation(i) for i in range(7)]}))
            answers = openpi_unpack(client.recv())  # pyright: ignore[reportArgumentType]
            assert [a["actions"][0, 0] for a in answers] == list(range(7))
            assert [a["server_timing"]["batch"] for a in answers] == [4, 4, 4, 4, 2, 2, 1]
            client.send(openpi_pack(observation(9)))
            assert openpi_unpack(client.recv())["actions"][0, 0] == 9, "as ever"  # pyright: ignore
        assert policy.calls == [4, 2, 1, 1]
        assert metric(server.address, 'vla_accel_requests_total{outcome="ok"}') == 2


def test_our_client_sends_a_list_with_what_travels_with_each() -> None:
    policy = MixingPolicy()
    chunk = np.ones((2, 7))
    guided = {**observation(1), wire.PREV_CHUNK: chunk, wire.INFERENCE_DELAY: 1}
    with background(policy, local(max_batch=2)) as server, PolicyClient(server.address) as client:
        answers = client.infer_batch([observation(0), guided])
        assert [a["actions"][0, 0] for a in answers] == [0, 1]
        assert [delay for _, delay in policy.got] == [None, 1]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([], r"ObservationError: batch: expected a list of observations, got \[\]"),
        ("x", "ObservationError: batch: expected a list of observations, got 'x'"),
        ([observation(1), 3], r"ObservationError: batch\[1\]: expected a map with text keys, got 3"),
        ([observation(1), {"prompt": "x"}], r"ObservationError: batch\[1\]: observation: missing observation/state"),
        ([{**observation(1), wire.INFERENCE_DELAY: 1}], r"batch\[0\]: expected rtc/prev_chunk and rtc/inference_delay"),
    ],
)
def test_a_bad_list_is_an_error_that_names_the_place(batch: Any, said: str) -> None:
    with background(GuidedPolicy(), LOCAL) as server, PolicyClient(server.address) as client:
        with pytest.raises(ServerError, match=said):
            client.infer({"batch": batch})
        assert client.infer(observation(2))["actions"][0, 0] == 2


def test_an_observation_with_a_key_named_batch_is_one_observation() -> None:
    with background(EchoPolicy(), LOCAL) as server, PolicyClient(server.address) as client:
        assert client.infer({**observation(2), "batch": [1]})["actions"][0, 0] == 2


# -- several policies --------------------------------------------------------------------------------------------------


def shelf(loads: list[str], budget: int | None = None) -> Shelf:
    """Policies `one`, `two` and `three` of 10 bytes each; `loads` notes each loading."""

    def load(name: str, factor: float) -> tuple[Any, int]:
        loads.append(name)
        return scaled(factor), 10

    factors = {"one": 1.0, "two": 2.0, "three": 3.0}
    return Shelf({n: (lambda n=n, f=f: load(n, f)) for n, f in factors.items()}, budget)


def test_clients_choose_a_policy_by_key_or_by_path() -> None:
    loads: list[str] = []
    with background(shelf(loads), LOCAL) as server:
        for where, policy, factor in (("", None, 1), ("", "two", 2), ("/three", None, 3), ("/two/", "two", 2)):
            with PolicyClient(server.address + where, policy=policy) as client:
                assert client.metadata["policies"] == ["one", "two", "three"]
                assert client.metadata["factor"] == factor, "the metadata are those of the policy that answers"
                assert client.infer(observation(5))["actions"][0, 0] == 5 * factor
                assert client.infer_batch([observation(6)] * 2)[1]["actions"][0, 0] == 6 * factor
        with pytest.raises(ServerError, match=r"HTTP 404.*; policy: expected one of three, two, one as the path$"):
            PolicyClient(server.address + "/four")
        # The metadata would be of one policy and the actions of another one.
        with pytest.raises(ConfigError, match=r"policy: expected one of .*, got 'two', below the path 'three'"):
            PolicyClient(server.address + "/three", policy="two")
        with pytest.raises(ConfigError, match=r"policy: expected one of .*two.*, of the server .*, got 'four'"):
            PolicyClient(server.address, policy="four")
        with (
            PolicyClient(server.address) as client,
            pytest.raises(ServerError, match="ObservationError: policy: expected one of one, two, three, got 'four'"),
        ):
            client.infer({**observation(1), "policy": "four"})
        assert metric(server.address, 'vla_accel_policy_requests_total{policy="two"}') == 4
    assert loads == ["three", "two", "one"], "each once"


def test_the_policy_not_used_for_the_longest_time_is_put_away() -> None:
    loads: list[str] = []
    two = shelf(loads, budget=29)
    two.start()
    assert two.loaded == ["two", "one"] and loads == ["three", "two", "one"]
    assert two.get("two").policy.metadata["factor"] == 2
    assert two.get("three").policy.metadata["factor"] == 3
    assert two.loaded == ["two", "three"] and loads[3:] == ["three"]
    assert two.get("").name == "one" and two.loaded == ["three", "one"]
    with pytest.raises(ObservationError, match="expected one of one, two, three, got 'x'"):
        two.get("x")


def test_one_policy_larger_than_the_budget_is_served_and_said(caplog: pytest.LogCaptureFixture) -> None:
    small = shelf([], budget=5)
    small.start()
    assert small.loaded == ["one"]
    assert "policy one alone takes more than the memory budget" in caplog.text


def test_a_single_policy_takes_the_key_as_part_of_the_observation() -> None:
    class Strict(EchoPolicy):
        def infer(self, observation: Any) -> Any:
            assert observation.get("policy") == "x"
            return super().infer(observation)

    with background(Strict(), LOCAL) as server, PolicyClient(f"{server.address}/anything") as client:
        assert client.infer({**observation(1), "policy": "x"})["actions"].shape == (10, 7)


def test_a_client_that_names_a_policy_is_refused_where_there_is_only_one() -> None:
    with (
        background(EchoPolicy(), LOCAL) as server,
        pytest.raises(ConfigError, match=r"policy: expected none, as it serves only one, .*, got 'x'"),
    ):
        PolicyClient(server.address, policy="x")


def test_policies_on_the_command_line() -> None:
    several = loader(Serve(policy=("a=auto:demo", "b=native_fp8:org/name"), memory_budget_gib=1.5, num_steps=3))
    assert several.loads == {"a": Load("demo", "auto", 3), "b": Load("org/name", "native_fp8", 3)}  # type: ignore
    assert several.budget == 3 * 2**29  # type: ignore[union-attr]
    for wrong in (("demo",), ("a=auto",), ("a=auto:demo", "a=auto:demo"), ("metrics=auto:demo",), ("a/b=auto:demo",)):
        with pytest.raises(ConfigError, match="policy: expected NAME=CONFIG:CHECKPOINT, each name once, got '"):
            loader(Serve(policy=wrong))
    with pytest.raises(ConfigError, match="got both"):
        loader(Serve(checkpoint="demo", policy=("a=auto:demo",)))


def test_a_path_that_chooses_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A server with one policy answers whatever the path, so it may be another policy than the robot's."""
    with background(scaled(2.0), LOCAL) as server:
        for where, warnings in (("", 0), ("/two", 1)):
            caplog.clear()
            with PolicyClient(server.address + where) as client:
                client.infer(observation(1))
            assert sum("whatever the path" in record.message for record in caplog.records) == warnings
