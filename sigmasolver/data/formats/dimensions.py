"""Role of a named dimension: trajectories, time, a spatial axis, or the components of a field.

Names and attributes follow the CF conventions and common simulation codes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["CHANNEL", "COUNT", "SPACE", "TIME", "is_longitude", "role_of"]

COUNT, TIME, CHANNEL = "count", "time", "channel"
SPACE = ("x", "y", "z")

_LONGITUDE, _EAST, _DEGREES = r"r?lon(gitude)?", r"deg(rees?)?[_ ]?(east|e)", r"(deg(rees?)?)?"
_NAME_PATTERNS = {
    COUNT: "count|samples?|runs?|members?|ensemble|reali[sz]ations?|number|traj(ectory|ectories)?|cases?"
    "|sim(ulations?)?|batch|initial_condition",
    TIME: "t|times?|frames?|(time_?)?steps?|valid_time",
    CHANNEL: "channels?|fields?|variables?|components?",
    "x": r"n?x([_-]?(c|h|centers?|centres?|axis|dim|coord(inate)?))?|" + _LONGITUDE + "|west_east|ni|i",
    "y": r"n?y([_-]?(c|h|centers?|centres?|axis|dim|coord(inate)?))?|r?lat(itude)?|south_north|nj|j",
    "z": r"n?z([_-]?(c|h|centers?|centres?|axis|dim|coord(inate)?))?|lev(els?)?|depth[tuvw]?|height|altitude|plev"
    "|pressure_level|bottom_top|nk|k",
}
_STANDARD_NAME_ROLES = {
    "realization": COUNT,
    "time": TIME,
    "longitude": "x",
    "grid_longitude": "x",
    "projection_x_coordinate": "x",
    "latitude": "y",
    "grid_latitude": "y",
    "projection_y_coordinate": "y",
    "height": "z",
    "altitude": "z",
    "depth": "z",
    "air_pressure": "z",
}
_AXIS_ROLES = {"T": TIME, "X": "x", "Y": "y", "Z": "z", "E": COUNT}


def role_of(dimension: str, attributes: Mapping[str, Any]) -> str | None:
    """Return the role of a dimension, from the attributes of its coordinate or else from its name; None if unknown."""
    role = _AXIS_ROLES.get(str(attributes.get("axis", "")).upper()) or _STANDARD_NAME_ROLES.get(
        str(attributes.get("standard_name"))
    )
    units = str(attributes.get("units", ""))
    if role is None and re.fullmatch(_EAST, units, re.I):
        role = "x"
    if role is None and re.fullmatch(r"degrees?_?(north|n)", units, re.I):
        role = "y"
    if role is None and " since " in units:
        role = TIME
    if role is not None:
        return role
    return next((r for r, pattern in _NAME_PATTERNS.items() if re.fullmatch(pattern, dimension.lower())), None)


def is_longitude(dimension: str, attributes: Mapping[str, Any]) -> bool:
    """Whether a coordinate is a longitude in degrees: by its unit, or by its name if the unit does not contradict."""
    units = str(attributes.get("units", "")).strip()
    named = re.fullmatch(_LONGITUDE, dimension.lower()) or "longitude" in str(attributes.get("standard_name", ""))
    return bool(re.fullmatch(_EAST, units, re.I) or (named and re.fullmatch(_DEGREES, units, re.I)))
