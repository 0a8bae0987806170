"""Named errors. Each says in one line what was found, what was expected, and how to fix it."""


class AdaptiveSpecError(Exception):
    """An error that the user can act on.

    Renders as one line, `{where}: found {found}; expected {expected}; fix: {fix}`; without `where` the prefix is
    left out. White space, line breaks included, is folded into single blanks, so that the line stays one line in a log.

    Args:
        found: what is there now; values of the user are best given as their repr.
        expected: what would have been accepted.
        fix: what to do about it.
        where: option, config key path or file that is at fault; "" where there is none.
    """

    def __init__(self, *, found: str, expected: str, fix: str, where: str = "") -> None:
        self.found = found
        self.expected = expected
        self.fix = fix
        self.where = where
        prefix = f"{where}: " if where else ""
        super().__init__(" ".join(f"{prefix}found {found}; expected {expected}; fix: {fix}".split()))


class ConfigError(AdaptiveSpecError, ValueError):
    """A configuration value, key, file or tree shape that is not accepted."""


class RefusedError(AdaptiveSpecError, ValueError):
    """A server option or model that ADAPTIVE does not run with.

    Args:
        reason: short slug, used as the label of the refusal counter.
        found, expected, fix, where: as in `AdaptiveSpecError`.
    """

    def __init__(self, *, reason: str, found: str, expected: str, fix: str, where: str = "") -> None:
        super().__init__(found=found, expected=expected, fix=fix, where=where)
        self.reason = reason
