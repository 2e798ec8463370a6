"""The account of a storm: what its sections and tormentors have logged, and what of that must not be."""
import os
from collections import Counter, namedtuple

from storm_section import read_counter

Read = namedtuple("Read", "line slot value writer token")


def read_log(directory):
    """Return the log: for each word that lines begin with, {name: (number of the line, the rest of it)}."""
    log = {word: {} for word in "read done released lost overlap unseen starved evicted removing removed".split()}
    with open(os.path.join(directory, "log")) as file:
        for number, line in enumerate(file):
            if line.endswith(" .\n"):
                word, name, *rest = line.split()[:-1]
                log[word][int(name)] = (number, *map(int, rest))
    log["read"] = {name: Read(*rest) for name, rest in log["read"].items()}
    return log


def find_counted(directory, reads):
    """Return the names in the chains of writers that end in the counters; raise when a counter is not as long."""
    counted = set()
    for entry in os.listdir(directory):
        if entry.startswith("counter."):
            counter, value, writer = read_counter(directory, int(entry.partition(".")[2]))
            os.close(counter)
            before = len(counted)
            while writer:
                counted.add(writer)
                writer = reads[writer].writer
            assert len(counted) - before == value, (entry, value, len(counted) - before)
    return counted


def find_bad_tokens(reads, ordered):
    """Return the names of those whose token was had before or, ordered, is not the highest yet of their slot."""
    bad, seen, highest = [], set(), Counter()
    for name, section in sorted(reads.items(), key=lambda item: item[1].line):
        if section.token:
            if section.token in seen or (ordered and section.token <= highest[section.slot]):
                bad.append(name)
            seen.add(section.token)
            highest[section.slot] = section.token
    return bad


def review(directory, removed):
    """Return (figures, faults) at the end of a storm. faults: names of sections, by what was wrong with them.

    removed: whether the file was removed by hand: then two may be inside and lose updates, and who has lost the lock
    was robbed only if nobody removed their file. It is "untold" when it was removed behind the start of their section
    and they say that they have released it.
    """
    log = read_log(directory)
    counted = find_counted(directory, log["read"])
    lost_updates = set(log["done"]) - counted
    removals = {name: log["removing"][number][0] for name, (_, number) in log["removed"].items()}
    figures = {
        "sections": len(log["done"]), "cut_short": len(set(log["read"]) - set(log["done"])),
        "tokens": sum(section.token > 0 for section in log["read"].values()),
        "evicted": len(log["evicted"]), "lost": len(log["lost"]),
        "overlaps": len(log["overlap"]), "lost_updates": len(lost_updates),
    }
    faults = {
        "overlaps": [] if removed else log["overlap"],
        "lost_updates": [] if removed else lost_updates,
        "tokens": find_bad_tokens(log["read"], not removed),
        "robbed": set(log["lost"]) - set(removals),
        "untold": [name for name in set(removals) & set(log["released"]) & set(log["read"])
                   if log["read"][name].line < removals[name]],
        "unseen": log["unseen"],
        "starved": log["starved"],
    }
    return figures, {fault: sorted(names) for fault, names in faults.items()}
