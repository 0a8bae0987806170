"""What a request may ask of ADAPTIVE: ``custom_params: {"adaptive": {...}}``, on every route that hands them on.

SGLang does so from `/generate`, `/v1/completions` and `/v1/chat/completions`.
"""

import reprlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from adaptivespec.config_checks import flag, number, optional, text
from adaptivespec.errors import ConfigError
from adaptivespec.section import Section

KEY = "adaptive"


@dataclass(frozen=True)
class RequestOptions(Section):
    """The options of one request. None of them can loosen what the server has set.

    Args:
        kappa: as `MarginConfig.kappa`; the larger of this and the server's counts. null: the server's.
        strict: accept nothing but the target's own tokens.
        enabled: false: strict, and the policy learns nothing from this request, which is still drafted with its batch.
        drift: false: the memory neither corrects the draft for this request nor learns from it.
        tenant: whose memory it is, where the request has no ``cache_salt`` or ``extra_key``, which say so first.
        share: teach the bank that all requests with this option share, and be corrected by it where the tenant's own knows
            nothing; for servers with ``drift.shared``.
        details: list the steps, and the promoted tokens with both probabilities, in the response.
    """

    SECTION: ClassVar[str] = f"custom_params.{KEY}"
    kappa: float | None = field(default=None, metadata={"check": optional(number(above=0.0, high=1.0))})
    strict: bool = field(default=False, metadata={"check": flag})
    enabled: bool = field(default=True, metadata={"check": flag})
    drift: bool = field(default=True, metadata={"check": flag})
    tenant: str | None = field(default=None, metadata={"check": optional(text)})
    share: bool = field(default=False, metadata={"check": flag})
    details: bool = field(default=False, metadata={"check": flag})

    @classmethod
    def of(cls, sampling_params: Any) -> Self:
        """The options in a request's sampling parameters.

        Raises:
            ConfigError: not an object, an unknown key or a bad value; names the field, what it holds and what it may.
        """
        custom = sampling_params.custom_params
        if custom is None:
            return cls()
        if not isinstance(custom, dict):
            # What may have been meant to ask for strict answers must not pass for asking nothing.
            raise ConfigError(
                where="custom_params",
                found=reprlib.repr(custom),
                expected="an object",
                fix=f'write {{"{KEY}": {{...}}}}, or leave it out',
            )
        return cls.from_dict(custom[KEY]) if KEY in custom else cls()

    def effective_kappa(self, server: float | None) -> float | None:
        """The kappa that this request is verified with under a server's; None is strict, 0 any ratio."""
        if server is None or self.strict or not self.enabled:
            return None
        return max(server, self.kappa or 0.0)
