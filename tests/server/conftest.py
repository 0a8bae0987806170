"""Servers for the tests of this folder: each started once, when first needed, at most two alive at a time.

The reference stays; the others follow one another, which is why tests are ordered by the server that they use. To write
tests against servers that run already, name their addresses:
ADAPTIVESPEC_TEST_SERVERS='{"ref": "http://127.0.0.1:31001", "ada": "http://127.0.0.1:31002"}'.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from adaptivespec.config import DriftConfig
from adaptivespec.launch import Server, speculation_args
from tests.server.client import Client, Reference
from tests.server.models import CYCLE, make_cyclic_pair, make_poison_draft, make_poisoned_bank
from tests.server.prompts import ALL, to_ids

# What a slow machine with other work may take; about 20 s on a quiet one.
START_SECONDS = 420
# In such a pool requests are retracted.
SMALL_POOL = ["--max-total-tokens", "800"]
COMMON = ["--dtype", "float32", "--sleep-on-idle", "--max-total-tokens", "8000"]
PAPER_RANGE = {"shape": {"range": "paper"}}
# Fixtures in the order in which their servers run.
ORDER = ("ada", "remembering", "poison", "cyclic", "engine_answers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def server_index(item: pytest.Item) -> int:
        used = [ORDER.index(name) for name in getattr(item, "fixturenames", ()) if name in ORDER]
        return max(used, default=-1)

    items.sort(key=server_index)  # stable: the order inside a file stays


def plain_environment() -> dict[str, str]:
    """This process's, without variables that steer a server: the command works as it stands."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "TORCH", "CUDA_"))}


class Servers:
    """Starts servers by name; a new one takes the place of the last, the reference excepted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._attached = json.loads(os.environ.get("ADAPTIVESPEC_TEST_SERVERS", "{}"))
        self._clients: dict[str, Client] = {}
        self._reference, self._current = ExitStack(), ExitStack()

    def get(self, name: str, model: Path, args: list[str]) -> Client:
        """The server of that name, started if it does not run."""
        if name in self._attached:
            return Client(self._attached[name])
        if name not in self:
            stack = self._reference
            if name != "ref":
                self.stop_current()
                stack = self._current
            with pytest.MonkeyPatch.context() as patch:
                for variable in os.environ.keys() - plain_environment().keys():
                    patch.delenv(variable)
                server = Server(model, [*COMMON, *args], log=self.folder / f"{name}.log", timeout=START_SECONDS)
            stack.enter_context(server)
            self._clients[name] = Client(server.url)
        return self._clients[name]

    def __contains__(self, name: str) -> bool:
        """Whether such a server runs."""
        return name in self._attached or name in self._clients

    def stop_current(self) -> None:
        """Make room for a server that something else starts."""
        self._current.close()
        self._clients = {key: client for key, client in self._clients.items() if key == "ref"}

    def close(self) -> None:
        self._current.close()
        self._reference.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    # So that a terminated test run takes its servers with it, as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = Servers(tmp_path_factory.mktemp("servers"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def adaptive_args(servers: Servers, draft: Path) -> Callable[..., list[str]]:
    """Arguments that select ADAPTIVE with a config, and a draft where it is not the demo pair's."""

    def arguments(config: dict, draft_path: Path = draft) -> list[str]:
        path = servers.folder / f"config-{len(list(servers.folder.glob('config-*')))}.json"
        path.write_text(json.dumps(config))
        return [
            *speculation_args("ADAPTIVE", draft_path),
            *("--speculative-adaptive-config", str(path), "--enable-metrics"),
        ]

    return arguments


@pytest.fixture(scope="session")
def ref(servers: Servers, target: Path) -> Client:
    """Plain decoding."""
    return servers.get("ref", target, [])


@pytest.fixture(scope="session")
def reference(ref: Client) -> Reference:
    """Plain decoding's greedy answers, remembered."""
    return Reference(ref)


@pytest.fixture(scope="session")
def ada_config() -> dict[str, Any]:
    """Of the server `ada`, strict until a test sets a kappa."""
    return {"policy": "cycle", "margin": {"sampled": True}, **PAPER_RANGE}


@pytest.fixture(scope="session")
def ada(servers: Servers, target: Path, adaptive_args: Callable, ada_config: dict[str, Any]) -> Client:
    """ADAPTIVE that changes the shape at every step, through all eight of the published range."""
    return servers.get("ada", target, adaptive_args(ada_config))


@pytest.fixture(scope="session")
def remembering(servers: Servers, target: Path, draft: Path, prompts: list, adaptive_args: Callable) -> Client:
    """ADAPTIVE with all that can be had beside the margin rule, and with a pool so small that requests are retracted.

    It chooses shapes as users have it, and takes misses by the rule of FLy where a test sets a kappa. Its memory starts
    with a bank that is wrong about the first two prompts' answers.
    """
    memory = {"enabled": True, "num_slots": 1024, "rate": 0.1, "threshold": 0.9, "check_every": 8, "shared": True}
    memory["file"] = str(servers.folder / "bank")
    if "remembering" not in servers:
        make_poisoned_bank(servers.folder / "bank", target, draft, prompts[:2], DriftConfig(**memory))
    config = {"policy": "dcs", "verifier": "fly", "fly": {"window": 3}, "drift": memory}
    config["shape"] = PAPER_RANGE["shape"] | {"extra": [[0, 1, 1]]}
    # Prompts are longer than 32 tokens, so that they are prefilled in pieces.
    args = [*adaptive_args(config), *SMALL_POOL, "--chunked-prefill-size", "32"]
    client = servers.get("remembering", target, args)
    client.set_state("adaptive_kappa", 0)  # the rule of FLy needs no kappa to be in force
    return client


@pytest.fixture(scope="session")
def poison(servers: Servers, target: Path, draft: Path, adaptive_args: Callable) -> Client:
    """ADAPTIVE with a draft that is always wrong."""
    folder = servers.folder / "poison-draft"
    if not folder.exists():
        make_poison_draft(draft, folder)
    return servers.get("poison", target, adaptive_args({"policy": "dcs", **PAPER_RANGE}, folder))


@pytest.fixture(scope="session")
def cycle_ids(tokenizer) -> list[int]:
    """The token of each character of the cycle."""
    ids = tokenizer(CYCLE).input_ids
    assert len(ids) == len(CYCLE) == 64
    return ids


@pytest.fixture(scope="session")
def cyclic(servers: Servers, target: Path, cycle_ids: list[int], adaptive_args: Callable) -> Client:
    """ADAPTIVE with a tiny pair whose draft is always right, and with a pool so small that requests are retracted."""
    folder = servers.folder / "cyclic"
    pair = (folder / "target", folder / "draft")
    if not folder.exists():
        pair = make_cyclic_pair(servers.folder, target, cycle_ids)
    return servers.get("cyclic", pair[0], [*adaptive_args({"policy": "dcs", **PAPER_RANGE}, pair[1]), *SMALL_POOL])


@pytest.fixture(scope="session")
def tokenizer(target: Path):
    return AutoTokenizer.from_pretrained(target)


@pytest.fixture(scope="session")
def prompts(tokenizer) -> list[list[int]]:
    """Token ids of 30 prompts."""
    return [to_ids(tokenizer, prompt) for prompt in ALL]
