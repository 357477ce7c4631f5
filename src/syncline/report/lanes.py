"""What of a timeline's communication is exposed."""

from __future__ import annotations

from syncline.model.timeline import NOT_COMPUTING, Interval, Timeline, union

__all__ = ["exposed_intervals"]


def exposed_intervals(timeline: Timeline) -> list[Interval]:
    """Return when a message is under way and nothing computes, in nanoseconds."""
    computing = union(s for s in timeline.spans if s.kind not in NOT_COMPUTING)
    exposed: list[Interval] = []
    index = 0
    for start, stop in union(s for s in timeline.spans if s.kind == "message"):
        while index < len(computing) and computing[index][1] <= start:
            index += 1
        clock = start
        following = index
        while following < len(computing) and computing[following][0] < stop:
            if clock < computing[following][0]:
                exposed.append((clock, computing[following][0]))
            clock = max(clock, computing[following][1])
            following += 1
        if clock < stop:
            exposed.append((clock, stop))
    return exposed
