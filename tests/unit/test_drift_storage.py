"""Banks as files: what is written is read back, and nothing else is taken for one."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from drift.memory import NO_BANK, DriftMemory
from drift.params import DriftParams
from drift.storage import BankFileError, load_bank, save_bank
from drift.tenants import Tenants

PARAMS = DriftParams(num_slots=5, num_tokens=3, num_banks=2, threshold=0.8, num_spare=2)
DRAFT_IDS, TARGET_VOCAB = torch.arange(9) * 2, 20


def make() -> tuple[DriftMemory, Tenants]:
    return DriftMemory(PARAMS, 4, 9, "cpu", DRAFT_IDS, TARGET_VOCAB), Tenants(PARAMS.num_banks)


def taught() -> tuple[DriftMemory, Tenants]:
    memory, tenants = make()
    generator = torch.Generator().manual_seed(0)
    tenants.assign(["a", "b"])
    banks = torch.tensor([0, 1])
    for token in (1, 4, 5):
        states = [torch.randn(2, size, generator=generator) for size in (4, 9, memory.num_columns)]
        memory.take_in(torch.tensor([token, token + 2]), banks)
        memory.learn(*states, banks)
    return memory, tenants


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_bank(tmp_path / "bank.safetensors", *taught(), model="demo")
    return tmp_path / "bank.safetensors"


def content_of(file: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as stream:
        return stream.metadata(), {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118


def test_a_bank_comes_back_as_it_was(file: Path) -> None:
    memory, tenants = make()
    load_bank(file, memory, tenants, "demo")
    wanted, wanted_tenants = taught()
    for name in ("keys", "token_ids", "bias", "owner", "last_used", "clock"):
        assert torch.equal(getattr(memory, name), getattr(wanted, name)), name
    assert memory.spare is not None
    assert wanted.spare is not None
    assert memory.spare.tokens.tolist() == wanted.spare.tokens.tolist() == [[1, 5], [3, 7]]
    assert torch.equal(memory.spare.last_used, wanted.spare.last_used)
    assert torch.equal(memory.spare.vocabulary[:9], DRAFT_IDS)
    assert tenants.banks == wanted_tenants.banks == {"a": 0, "b": 1}
    assert not file.with_name(file.name + ".part").exists()


def test_another_models_bank_is_refused(file: Path) -> None:
    memory, tenants = make()
    with pytest.raises(BankFileError, match="found model 'demo'; expected 'other'; to fix"):
        load_bank(file, memory, tenants, "other")
    assert memory.occupancy() == [0, 0]


def test_a_tenants_bank_is_never_taken_for_the_shared_one(file: Path) -> None:
    """As many banks in all, one of which is not a tenant's."""
    memory, _ = make()
    with pytest.raises(BankFileError, match="num_tenants"):
        load_bank(file, memory, Tenants(PARAMS.num_banks - 1), "demo")


def test_a_bank_of_other_sizes_is_refused(file: Path) -> None:
    memory = DriftMemory(DriftParams(num_slots=6, num_tokens=3, num_banks=2), 4, 9, "cpu")
    with pytest.raises(BankFileError, match="found sizes"):
        load_bank(file, memory, Tenants(2), "demo")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", torch.full((5, 3), 13), "token_ids outside 0 to 12"),
        ("token_ids", torch.tensor([[9, 0, 1]] * 5), "a slot with a token of another bank"),
        ("spare_tokens", torch.full((2, 2), 20), "spare_tokens outside 0 to 19"),
        ("spare_last_used", torch.full((2, 2), 4), "spare_last_used outside 0 to 3"),
        ("owner", torch.full((5,), 2), "owner outside -1 to 1"),
        ("bias", torch.full((5, 3), float("nan")), "bias outside"),
        ("keys", torch.full((5, 4), float("inf")), "keys outside"),
        ("last_used", torch.full((5,), 10**6), "last_used outside 0 to 3"),
        ("keys", torch.zeros(5, 4, dtype=torch.float64), "tensor keys: torch.float64"),
        ("bias", None, "tensor bias: none"),
    ],
)
def test_impossible_values_are_refused(file: Path, name: str, value: torch.Tensor | None, message: str) -> None:
    metadata, tensors = content_of(file)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, file, metadata=metadata)
    memory, tenants = make()
    with pytest.raises(BankFileError, match=message):
        load_bank(file, memory, tenants, "demo")
    assert memory.occupancy() == [0, 0]
    assert tenants.banks == {}


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": 0, "b": 0}', '{"a": "0"}', '{"a": 0, "b": 1, "c": 2}'])
def test_impossible_tenants_are_refused(file: Path, text: str) -> None:
    metadata, tensors = content_of(file)
    save_file(tensors, file, metadata=metadata | {"tenants": text})
    with pytest.raises(BankFileError, match="tenants"):
        load_bank(file, *make(), "demo")


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_whole(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "bank.safetensors"
    save_bank(file, *taught(), model="demo")
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    memory, tenants = make()
    try:
        load_bank(file, memory, tenants, "demo")
    except BankFileError:
        assert memory.occupancy() == [0, 0]
        assert tenants.banks == {}
    else:
        logits = memory.widen(torch.zeros(2, 9))
        memory.apply(torch.randn(2, 4), logits, torch.tensor([0, 1]))
        assert logits.isfinite().all()


def test_a_file_that_is_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BankFileError, match="to fix: delete the file or name another"):
        load_bank(tmp_path / "none", *make(), "demo")


def test_the_name_unheard_of_for_longest_loses_its_bank() -> None:
    tenants = Tenants(2)
    found = [tenants.assign(names) for names in (["a"], ["b", "a"], ["b"], ["c"], ["c", "b"], ["a"])]
    assert found == [([0], []), ([1, 0], []), ([1], []), ([0], [0]), ([0, 1], []), ([0], [0])]


def test_names_of_one_batch_never_share_a_bank() -> None:
    assert Tenants(2).assign(["a", "b", "c", "a"]) == ([0, 1, NO_BANK, 0], [])


@settings(deadline=None)
@given(batches=st.lists(st.lists(st.sampled_from("abcde"), max_size=4)), num_banks=st.integers(1, 4))
def test_a_bank_changes_its_name_only_where_it_is_emptied(batches: list[list[str]], num_banks: int) -> None:
    tenants, names = Tenants(num_banks), {}
    for batch in batches:
        banks, emptied = tenants.assign(batch)
        for name, bank in zip(batch, banks, strict=True):
            if bank != NO_BANK:
                assert names.get(bank, name) == name or bank in emptied
                names[bank] = name
        assert len({(name, bank) for name, bank in zip(batch, banks, strict=True) if bank != NO_BANK}) == len(
            set(banks) - {NO_BANK}
        )
