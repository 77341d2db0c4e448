"""Float64 definitions of statistics of a batch."""


def center(x, running, momentum=0.1):
    m = x.mean(0)
    return {"y": x - m, "running": running + momentum * (m - running)}
