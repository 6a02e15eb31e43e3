"""The tables of docs/performance.md that publish.py writes, from the rows that it measured."""

import measure

PLACES = ("near", "apart")
# The rows of a run that must have been measured at a place, or the medians there are of too few.
SHARE_MIN = 1 / 3

# The consequences for peers and buffers when a process is killed.
OURS = "peers keep running; its buffers are reclaimed"
NOTHING = "not handled"
THREADS = "not applicable: one process"
TACHYON = "not detected; the peer polls forever"
BOOST_RING = "not detected; the peer polls forever"
BOOST_QUEUE = "not detected; the cell in use is lost"
BOOST_LOCKED = "not detected; deadlock if it held the lock"
ICEORYX = "its resources are reclaimed when the next node starts"
AERON = "detected after 10 s by the media driver, a single point of failure"
ZENOH = "detected immediately; buffers are reclaimed after 0.1 s, even those of a stalled reader"
KERNEL = "detected immediately; each message is copied twice"

# Label, the row's name, the goal, and what a kill does.
ROUND_TRIP = [
    ("bare cache line, two atomics", "cacheline-rtt", "", NOTHING),
    ("own bare primitive, 48 B in the slot (`rings.rs`)", "inline-rtt", "", NOTHING),
    ("**inline, 48 B, spsc**", "inline-rtt-48-spsc-poll", "1.2", OURS),
    ("own bare primitive, slot and buffer (`rings.rs`)", "pooled-rtt", "", NOTHING),
    ("**pooled, spsc**", "pooled-rtt-64-spsc-poll", "1.7", OURS),
    ("**inline, 48 B, mpmc**", "inline-rtt-48-mpmc-poll", "", OURS),
    ("**pooled, mpmc**", "pooled-rtt-64-mpmc-poll", "", OURS),
    ("rtrb, spsc", "rtrb-rtt", "", THREADS),
    ("Tachyon 0.5, spsc", "tachyon-rtt", "", TACHYON),
    ("boost `spsc_queue` in a managed segment", "boost-spsc-rtt", "", BOOST_RING),
    ("crossbeam ArrayQueue, mpmc", "arrayqueue-rtt", "", THREADS),
    ("boost `lockfree::queue` in a managed segment, mpmc", "boost-mpmc-rtt", "", BOOST_QUEUE),
    ("Aeron 1.54 (C), `aeron:ipc`", "aeron-rtt", "", AERON),
    ("iceoryx2 0.10", "iceoryx2-rtt", "", ICEORYX),
    ("pipe, polled", "pipe-rtt-poll", "", KERNEL),
    ("boost `message_queue`, polled", "boost-mq-rtt-poll", "", BOOST_LOCKED),
    ("Unix socket, polled", "seqpacket-rtt-poll", "", KERNEL),
    ("Zenoh 1.10, shared memory, sleeping", "zenoh-rtt", "", ZENOH),
]
# Label, the row's name, and the goal.
ONE_WAY = [
    ("own bare primitive, 48 B in the slot", "inline-oneway", ""),
    ("**inline, 48 B, spsc**", "inline-oneway-48-spsc-poll", "50"),
    ("own bare primitive, slot and buffer", "pooled-oneway", ""),
    ("**pooled, spsc**", "pooled-oneway-64-spsc-poll", "50"),
    ("**pooled, spsc, by 16**", "pooled-oneway-64-spsc-poll-batch16", "25"),
    ("**inline, 48 B, mpmc**", "inline-oneway-48-mpmc-poll", ""),
    ("**pooled, mpmc**", "pooled-oneway-64-mpmc-poll", "80"),
    ("**pooled, mpmc, by 16**", "pooled-oneway-64-mpmc-poll-batch16", "80"),
    ("rtrb, spsc", "rtrb-oneway", ""),
    ("Tachyon 0.5, spsc", "tachyon-oneway", ""),
    ("boost `spsc_queue` in a managed segment", "boost-spsc-oneway", ""),
    ("crossbeam ArrayQueue, mpmc", "arrayqueue-oneway", ""),
    ("boost `lockfree::queue` in a managed segment, mpmc", "boost-mpmc-oneway", ""),
    ("Aeron 1.54 (C), `aeron:ipc`", "aeron-oneway", ""),
    ("iceoryx2 0.10", "iceoryx2-oneway", ""),
    ("pipe", "pipe-oneway", ""),
    ("boost `message_queue`", "boost-mq-oneway", ""),
    ("Unix socket", "seqpacket-oneway", ""),
    ("Zenoh 1.10, shared memory", "zenoh-oneway", ""),
]
# Label, the rows of one way and round trip.
BULK = [
    ("own bare primitive, ring of 16", "fill-read-64k", "pooled-rtt-64k"),
    ("**pooled, spsc**", "pooled-oneway-65536-spsc-poll", "pooled-rtt-65536-spsc-poll"),
    ("**as DATA, spsc**", "data-oneway-65536-spsc-poll", "data-rtt-65536-spsc-poll"),
    ("Tachyon 0.5, ring of 63", "tachyon-oneway-64k", "tachyon-rtt-64k"),
    ("boost `spsc_queue`, copied in and out", "boost-spsc-oneway-64k", "boost-spsc-rtt-64k"),
    ("Aeron 1.54 (C), copied in, in two frames", "aeron-oneway-64k", "aeron-rtt-64k"),
    ("iceoryx2 0.10", "iceoryx2-oneway-64k", "iceoryx2-rtt-64k"),
    ("boost `message_queue`, copied in and out", "boost-mq-oneway-64k", "boost-mq-rtt-64k"),
    ("Zenoh 1.10, shared memory", "zenoh-oneway-64k", "zenoh-rtt-64k"),
    ("pipe", "pipe-oneway-64k", None),
    ("Unix socket", "seqpacket-oneway-64k", None),
]
# From a bare cache line to a message of shmesh: what each step adds, and the rows of its round trip and of its stream.
STEPS = [
    ("a bare cache line, two atomics", "cacheline-rtt", None),
    ("in the ring: slots that are lines, with 48 bytes and a number", "inline-rtt", "inline-oneway"),
    ("**inline message, `spsc`**: seat, length, copy", "inline-rtt-48-spsc-poll", "inline-oneway-48-spsc-poll"),
    ("**inline message, `mpmc`**: cells, shared `tail` and `head`", "inline-rtt-48-mpmc-poll", "inline-oneway-48-mpmc-poll"),
    ("in a buffer: a ring of indices, and buffers in turn", "pooled-rtt", "pooled-oneway"),
    ("and a line with owner and descriptor, plain stores", "described-rtt", "described-oneway"),
    ("and the receiver takes and releases by exchanges", "released-rtt", "released-oneway"),
    ("and the sender claims by an exchange", "claimed-rtt", "claimed-oneway"),
    ("**pooled message, `spsc`**: hints, seat, the last buffer first", "pooled-rtt-64-spsc-poll", "pooled-oneway-64-spsc-poll"),
    ("**pooled message, `mpmc`**: shared `tail` and `head`", "pooled-rtt-64-mpmc-poll", "pooled-oneway-64-mpmc-poll"),
]


def names():
    """All rows that these tables want, beside those of the steps."""
    wanted = [name for _, name, *_ in ROUND_TRIP + ONE_WAY] + [name for _, *pair in BULK for name in pair if name]
    return list(dict.fromkeys(wanted))


def shown(result):
    """The medians to show, and the head of each place.

    Where this run hardly ever had its cores at a place, the figures of an earlier run are shown there, under its date.
    """
    found, heads = {}, {}
    for place in PLACES:
        for run in (result, result.get("earlier", {}).get(place)):
            rows = run["rows"] if run else []
            here = [row for row in rows if measure.place_of(row) == place]
            if here and len(here) >= len(rows) * SHARE_MIN:
                found |= measure.medians(here)
                heads[place] = place if run is result else f"{place} ({run['date']})"
                break
    return found, heads


def with_earlier(result, before):
    """The result with what an earlier one had at the places where this one hardly was."""
    earlier = {}
    _, heads = shown(result)
    for place in PLACES:
        # The run that measured there last, if this one did not.
        last = before if before and shown(before)[1].get(place) == place else (before or {}).get("earlier", {}).get(place)
        if place not in heads and last:
            rows = [row for row in last["rows"] if measure.place_of(row) == place]
            earlier[place] = {**{key: last[key] for key in ("date", "commit", "machine", "load")}, "rows": rows}
    return {**result, "earlier": earlier}


def ns(median):
    return f"{median['p50']:,.0f}"


def us(median):
    return f"{median['p50'] / 1000:.1f}"


def ratio(median):
    return f"{median['p50'] / median['floor_ns']:.1f}"


def table(result, heads, rows, tail=()):
    """Markdown: for each row its label, for each place what `heads` make of the row's medians, and the rest of the row.

    `heads` are pairs of a title and (index of a name in the row, form). Rows that were not measured are named below the table.
    """
    found, places = shown(result)
    columns = [(f"{places[place]}: {title}", place, index, form) for place in places for title, index, form in heads]
    lines = ["| | " + " | ".join([head for head, *_ in columns] + list(tail)) + " |", "|---|" + "---|" * (len(columns) + len(tail))]
    missing = []
    for label, *cells in rows:
        values = [(form, found.get((cells[index], place))) for _, place, index, form in columns]
        if any(median for _, median in values):
            texts = [form(median) if median else "" for form, median in values] + cells[len(cells) - len(tail) :]
            lines.append(f"| {label} | " + " | ".join(texts) + " |")
        else:
            missing.append(label.replace("*", ""))
    if missing:
        lines += ["", f"Not measured: {'; '.join(missing)}."]
    return "\n".join(lines) + "\n"


def comparison(result):
    """The tables beside the peers, by the names of their marks."""
    return {
        "round trip": table(result, [("ns", 0, ns), ("of the floor", 0, ratio)], ROUND_TRIP, ("goal", "when a side is killed")),
        "one way": table(result, [("ns", 0, ns)], ONE_WAY, ("goal",)),
        "64 KiB": table(result, [("one way, us", 0, us), ("round trip, us", 1, us)], BULK),
    }


def steps(result):
    """The table of the steps, by the name of its marks."""
    return {"steps": table(result, [("round trip", 0, ns), ("one way", 1, ns)], STEPS)}


def marks(name):
    return f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"


def written(document, tables):
    """The document with these tables between their marks."""
    for name, text in tables.items():
        begin, end = marks(name)
        before, rest = document.split(begin)
        _, after = rest.split(end)
        document = before + begin + text + end + after
    return document
