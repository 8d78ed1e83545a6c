"""
One target under atheris, in its own process, which libFuzzer ends.

Arguments: the name of the target, then those of libFuzzer. If libFuzzer restarts itself, it uses the program that
`--again=` names.
"""

from __future__ import annotations

import sys
from random import Random

import atheris

from tests.fuzz.mutation import mutated
from tests.fuzz.targets import target

_HALF = 0.5
_AGAIN = "--again="


def main(arguments: list[str]) -> None:
    """Fuzz; does not return."""
    name, *options = [item for item in arguments if not item.startswith(_AGAIN)]
    again = next((element.removeprefix(_AGAIN) for element in arguments if element.startswith(_AGAIN)), name)
    with atheris.instrument_imports(include=["mediatord"]):
        tried = target(name)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < _HALF:
            return bytes(atheris.Mutate(data, most))
        return mutated(data, rng, most, tried.words)

    atheris.Setup([again, *options], tried.run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
