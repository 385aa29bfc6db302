"""The ranks' colours, evenly around a circle of hues."""

from __future__ import annotations

import math


def rank_colour(rank: int, ranks: int) -> str:
    """Return a rank's colour as #rrggbb: hues evenly around the OKLCH circle, neighbours a little lighter or darker."""
    hue = math.radians(262 + 360 * rank / max(ranks, 3))
    lightness = 0.66 + (0.07 if rank % 2 else -0.03)
    return _oklch(lightness, 0.135, hue)


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """B. Ottosson's OKLab in polar form, to sRGB."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    red = 4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short
    green = -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short
    blue = -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short
    return "#" + "".join(f"{_gamma(channel):02x}" for channel in (red, green, blue))


def _gamma(linear: float) -> int:
    linear = min(max(linear, 0.0), 1.0)
    encoded = 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
    return round(255 * encoded)
