"""Which isolation key has which bank, on the host."""

from collections import OrderedDict
from collections.abc import Sequence

from drift.memory import NO_BANK


class Tenants:
    """Gives each name a bank of its own; with more names than banks, the name unheard of for longest loses its bank.

    Args:
        num_banks: banks there are for tenants.
    """

    def __init__(self, num_banks: int) -> None:
        self._banks: OrderedDict[str, int] = OrderedDict()
        self.num_banks = num_banks

    def assign(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """The bank of each name of a batch; `NO_BANK` for names beyond the number of banks.

        Returns:
            banks, aligned with ``names``; of these, those that were another name's and have to be emptied.
        """
        emptied = []
        for name in names:
            if name in self._banks:
                self._banks.move_to_end(name)
        for name in names:
            if name in self._banks:
                continue
            if len(self._banks) < self.num_banks:
                self._banks[name] = len(self._banks)
                continue
            oldest = next(iter(self._banks))
            if oldest not in names:
                self._banks[name] = self._banks.pop(oldest)
                emptied.append(self._banks[name])
        return self.find(names), emptied

    def find(self, names: Sequence[str]) -> list[int]:
        """The bank of each name, `NO_BANK` for names without; gives and takes none."""
        return [self._banks.get(name, NO_BANK) for name in names]

    @property
    def banks(self) -> dict[str, int]:
        """Bank of each name, the one heard of last at the end."""
        return dict(self._banks)

    def restore(self, banks: dict[str, int]) -> None:
        """Take over `banks` of another run."""
        self._banks = OrderedDict(banks)
