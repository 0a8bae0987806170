"""The decoders that the demo compares, as arguments of SGLang's own launch command."""

from dataclasses import dataclass

from adaptivespec.reports import file_name

COMMON_ARGS = (
    "--dtype",
    "bfloat16",
    "--sleep-on-idle",  # an idle scheduler would take a core from the server being measured
    "--max-total-tokens",
    "20000",  # two servers share the machine
    "--enable-metrics",  # answers carry decode_throughput
)


@dataclass(frozen=True)
class Configuration:
    """One decoder: `args` are what its launch command has beyond model and `COMMON_ARGS`."""

    name: str
    args: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """Its name as a file name."""
        return file_name(self.name.lower()).strip("-")


PLAIN = Configuration("plain")
ADAPTIVE_NAME = "ADAPTIVE"


def speculative_configurations(draft: str, *, quick: bool = False) -> list[Configuration]:
    """The decoders measured against `PLAIN`, in the order of the report.

    Args:
        draft: folder or hub name of the EAGLE-3 draft.
        quick: only SGLang's default and ADAPTIVE.
    """
    chains = [] if quick else [_eagle3(draft, shape) for shape in ((3, 1, 4), (7, 1, 8))]
    default = Configuration("EAGLE3 default", _draft_args("EAGLE3", draft))
    return [*chains, default, Configuration(ADAPTIVE_NAME, _draft_args("ADAPTIVE", draft))]


def _eagle3(draft: str, shape: tuple[int, int, int]) -> Configuration:
    options = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    flags = [text for option, value in zip(options, shape, strict=True) for text in (option, str(value))]
    name = "EAGLE3 ({},{},{})".format(*shape)
    return Configuration(name, (*_draft_args("EAGLE3", draft), *flags))


def _draft_args(algorithm: str, draft: str) -> tuple[str, ...]:
    return "--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft
