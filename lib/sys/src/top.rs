//! The table of links that `shmesh top` and `kubectl shmesh top` print.
//!
//! `shmesh top` makes a [`LinkRow`] from a sample. `kubectl shmesh top` parses it from the output of `shmesh top --output json` in the
//! sidecars, which may be of another release: keys that are missing are empty cells, and other keys are ignored.

use crate::human;

/// The headings of the columns, as [`Table`](crate::table::Table) expects them.
pub const COLUMNS: [&str; 12] = [
    "LINK",
    "RING",
    "PRIMARY",
    "SECONDARY",
    ">M2S/S",
    ">S2M/S",
    ">QUEUED",
    "POOL",
    ">ASLEEP",
    ">WOKEN/S",
    ">P50",
    ">P99",
];

/// The meaning of the columns, for the help of the commands.
pub const COLUMNS_HELP: &str = "\
M2S/S and S2M/S are messages per second, primary to secondary and back. QUEUED counts messages that are sent and not received, in both
directions; for a broadcast ring, those that the slowest reader has not received. POOL is the pool with the largest share of used
buffers. ASLEEP counts participants that sleep until a message arrives, and WOKEN/S the system calls that wake them. P50 and P99 are the
median and the 99th percentile of the time from sending to receiving in the interval, of links with `latency: {sample: 64}`. A link that
was just created, and one in NVIPC's layout, has no rates.";

/// A link in the table.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(default))]
pub struct LinkRow {
    /// The name of the link.
    pub name: String,
    /// The reason why the link cannot be read; the rest is empty then.
    pub error: Option<String>,
    /// The ring mode, or `nvipc`.
    pub mode: String,
    /// The attached participants of both sides.
    pub participants: Vec<RowParticipant>,
    /// Messages sent per second; `None` if the rate is unknown.
    pub messages_per_second: Directions<Option<f64>>,
    /// Messages sent and not received.
    pub queued: Directions<u64>,
    /// The pools, and how many of their buffers are used.
    pub pools: Vec<PoolUse>,
    /// System calls per second that woke a receiver; `None` if the rate is unknown.
    pub wake_ups_per_second: Option<f64>,
    /// The time from sending to receiving; `None` if no message was timed.
    pub latency_seconds: Option<Quantiles>,
}

/// A value for each direction of a link.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(default))]
pub struct Directions<T> {
    /// From the primary to the secondary side.
    pub m2s: T,
    /// From the secondary to the primary side.
    pub s2m: T,
}

/// A participant of a link in the table.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(default))]
pub struct RowParticipant {
    /// The side: `primary` or `secondary`.
    pub side: String,
    /// Its process id, as its own pid namespace numbers it.
    pub pid: u32,
    /// The state of its process: `alive`, `dead`, `unknown` or `evicted`.
    pub state: String,
    /// Whether it sleeps until a message arrives.
    pub asleep: bool,
}

/// The buffers of a pool.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(default))]
pub struct PoolUse {
    /// The name of the pool.
    #[cfg_attr(feature = "serde", serde(rename = "pool"))]
    pub name: String,
    /// The number of used buffers.
    pub used: usize,
    /// The number of buffers.
    pub len: usize,
}

/// The median and the 99th percentile of a time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(default))]
pub struct Quantiles {
    /// The median, in seconds.
    pub p50: f64,
    /// The 99th percentile, in seconds.
    pub p99: f64,
}

impl LinkRow {
    /// Formats the cells under [`COLUMNS`].
    #[must_use]
    pub fn cells(&self) -> [String; COLUMNS.len()] {
        if self.error.is_some() {
            let mut cells = [const { String::new() }; COLUMNS.len()];
            cells[0].clone_from(&self.name);
            "unusable".clone_into(&mut cells[1]);
            return cells;
        }
        let none = || "-".to_owned();
        let rate = |rate: Option<f64>| rate.map_or_else(none, human::rate);
        let time = |quantile: fn(Quantiles) -> f64| {
            self.latency_seconds.map_or_else(none, |times| human::nanos(quantile(times) * 1e9))
        };
        let side = |side: &str| {
            let of_side = self.participants.iter().filter(|one| one.side == side);
            processes(of_side.map(|one| (one.pid, one.state.as_str())))
        };
        let pool = fullest(&self.pools).map(|pool| format!("{} {}%", pool.name, pool.percent()));
        [
            self.name.clone(),
            self.mode.clone(),
            side("primary"),
            side("secondary"),
            rate(self.messages_per_second.m2s),
            rate(self.messages_per_second.s2m),
            self.queued.m2s.saturating_add(self.queued.s2m).to_string(),
            pool.unwrap_or_else(none),
            self.participants.iter().filter(|one| one.asleep).count().to_string(),
            rate(self.wake_ups_per_second),
            time(|times| times.p50),
            time(|times| times.p99),
        ]
    }
}

impl PoolUse {
    /// The share of used buffers in percent.
    #[must_use]
    pub fn percent(&self) -> usize {
        self.used.saturating_mul(100) / self.len.max(1)
    }
}

/// Returns the pool with the largest share of used buffers. Among equals, the first.
#[must_use]
pub fn fullest(pools: &[PoolUse]) -> Option<&PoolUse> {
    let fuller = |a: &PoolUse, b: &PoolUse| b.used.saturating_mul(a.len) > a.used.saturating_mul(b.len);
    pools.iter().reduce(|fullest, pool| if fuller(fullest, pool) { pool } else { fullest })
}

/// The processes of one side in a few words: `4711`, `4711 dead, 4713 x2`, or `-` if there are none.
pub fn processes<'a>(of_side: impl IntoIterator<Item = (u32, &'a str)>) -> String {
    let mut groups: Vec<(u32, &str, usize)> = Vec::new();
    for (pid, state) in of_side {
        match groups.iter_mut().find(|(p, s, _)| (*p, *s) == (pid, state)) {
            Some(group) => group.2 += 1,
            None => groups.push((pid, state, 1)),
        }
    }
    let texts = groups.iter().map(|(pid, state, count)| {
        let state = if *state == "alive" { String::new() } else { format!(" {state}") };
        let count = if *count == 1 { String::new() } else { format!(" x{count}") };
        format!("{pid}{state}{count}")
    });
    let text = texts.collect::<Vec<_>>().join(", ");
    if text.is_empty() { "-".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Table;

    fn pool(name: &str, used: usize, len: usize) -> PoolUse {
        PoolUse { name: name.to_owned(), used, len }
    }

    fn participant(side: &str, pid: u32, state: &str, asleep: bool) -> RowParticipant {
        RowParticipant { side: side.to_owned(), pid, state: state.to_owned(), asleep }
    }

    fn row(latency_seconds: Option<Quantiles>) -> LinkRow {
        LinkRow {
            name: "radio".to_owned(),
            error: None,
            mode: "spsc".to_owned(),
            participants: vec![
                participant("primary", 10, "alive", false),
                participant("primary", 10, "alive", true),
                participant("secondary", 20, "dead", true),
            ],
            messages_per_second: Directions { m2s: Some(1500.5), s2m: None },
            queued: Directions { m2s: 3, s2m: 1 },
            pools: vec![pool("cpu_msg", 1, 4), pool("cpu_data", 3, 4)],
            wake_ups_per_second: Some(0.0),
            latency_seconds,
        }
    }

    #[test]
    fn times_have_units_and_are_a_dash_without_samples() {
        let timed = row(Some(Quantiles { p50: 3.1e-7, p99: 0.004 }));
        let unusable =
            LinkRow { name: "bad".to_owned(), error: Some("damaged".to_owned()), ..LinkRow::default() };
        let mut table = Table::new(&COLUMNS);
        for row in [timed, row(None), unusable] {
            table.row(row.cells());
        }
        assert_eq!(
            table.lines(None),
            [
                "LINK   RING      PRIMARY  SECONDARY    M2S/S  S2M/S  QUEUED  POOL          ASLEEP  WOKEN/S     P50      P99",
                "radio  spsc      10 x2    20 dead    1.5 k/s      -       4  cpu_data 75%       2     0 /s  310 ns  4.00 ms",
                "radio  spsc      10 x2    20 dead    1.5 k/s      -       4  cpu_data 75%       2     0 /s       -        -",
                "bad    unusable",
            ]
        );
    }

    #[cfg(feature = "serde")]
    #[test]
    fn answer_of_an_older_release_has_empty_cells() {
        let json = r#"{"name": "radio", "usable": true, "mode": "spsc", "messages_per_second": {"m2s": 1500.5, "s2m": null},
            "queued": {"m2s": 3, "s2m": 1}, "pools": [{"pool": "cpu_msg", "used": 1, "len": 4}, {"pool": "cpu_data", "used": 3, "len": 4}],
            "wake_ups_per_second": 0.0, "later": {"key": 1}, "participants": [
                {"side": "primary", "pid": 10, "state": "alive"},
                {"side": "primary", "pid": 10, "state": "alive", "asleep": true},
                {"side": "secondary", "pid": 20, "state": "dead", "asleep": true}]}"#;
        assert_eq!(serde_json::from_str::<LinkRow>(json).unwrap(), row(None));
    }

    #[test]
    fn fullest_pool_has_the_largest_share_of_used_buffers() {
        let pools = [pool("a", 5, 100), pool("b", 2, 4), pool("c", 1, 2)];
        assert_eq!(fullest(&pools).map(|pool| (pool.name.as_str(), pool.percent())), Some(("b", 50)));
        assert_eq!(fullest(&[]), None);
        assert_eq!(pool("empty", 0, 0).percent(), 0);
    }

    #[test]
    fn processes_are_grouped_by_state() {
        let side = [(7, "alive"), (8, "dead"), (7, "alive"), (7, "evicted")];
        assert_eq!(processes(side), "7 x2, 8 dead, 7 evicted");
        assert_eq!(processes([]), "-");
    }
}
