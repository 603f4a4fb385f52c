"""One target under atheris, in this process: `python -m benches.fuzz.one TARGET CORPUS [libFuzzer's flags]`."""

import sys

import atheris


def main() -> None:
    """Fuzz until libFuzzer's limits; it ends the process."""
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=["gateway", "contracts", "workers", "observability", "msgspec"]):
        from benches.fuzz.targets import TARGETS  # noqa: PLC0415 - what is imported in here is watched
    target = TARGETS[name]

    def give(data: bytes) -> None:
        target(data)

    atheris.Setup(sys.argv, give)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
