"""Fixtures and settings of all tests."""

from pathlib import Path

import pytest
from hypothesis import settings

# A busy CI machine can stall any single example; what is tested here is never speed. Half of hypothesis' usual number of
# examples: every run draws others.
settings.register_profile("adaptivespec", deadline=None, max_examples=50)
settings.load_profile("adaptivespec")


@pytest.fixture(scope="session")
def target() -> Path:
    """Folder of the demo target, made on first use."""
    from adaptivespec.demo.target import prepare_target

    return prepare_target()


@pytest.fixture(scope="session")
def draft() -> Path:
    """Folder of the demo pair's draft."""
    from adaptivespec.demo.draft import draft_folder

    return draft_folder()
