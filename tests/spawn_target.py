"""A module-level function for children that multiprocessing spawns."""

from scale_template import ARCH, SCALE, ScaleConfig

from hpcjit import build


def error_text(code: int) -> str:
    return build.load(SCALE, ScaleConfig(), arch=ARCH).error_text(code)
