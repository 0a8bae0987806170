"""The decoders that the demo compares, as arguments of SGLang's own launch command."""

from dataclasses import dataclass

from adaptivespec.launch import speculation_args
from adaptivespec.reports import file_name
from adaptivespec.shapes import TreeShape

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
    shapes = () if quick else (TreeShape(3, 1, 4), TreeShape(7, 1, 8))
    chains = [Configuration(f"EAGLE3 {shape}", speculation_args("EAGLE3", draft, shape)) for shape in shapes]
    default = Configuration("EAGLE3 default", speculation_args("EAGLE3", draft))
    return [*chains, default, Configuration(ADAPTIVE_NAME, speculation_args(ADAPTIVE_NAME, draft))]
