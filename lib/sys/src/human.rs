//! Formatting of numbers for people: the only place that formats sizes, times and rates for commands.

/// A number of bytes: `64 B`, `8 KiB`, `24.1 MiB`. Rounded down, so that links of a size that is shown as free fit.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    const UNITS: [(u64, &str); 5] =
        [(1 << 50, "PiB"), (1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let Some((unit, name)) = UNITS.into_iter().find(|(unit, _)| bytes >= *unit) else {
        return format!("{bytes} B");
    };
    let (whole, tenth) = (bytes / unit, bytes % unit * 10 / unit);
    if tenth == 0 { format!("{whole} {name}") } else { format!("{whole}.{tenth} {name}") }
}

/// A rate of bytes: `3.1 GiB/s`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates are positive, and fit 64 bits"
)]
#[must_use]
pub fn bytes_per_second(rate: f64) -> String {
    format!("{}/s", bytes(rate.round() as u64))
}

/// A time given in nanoseconds: `287 ns`, `3.4 µs`, `1.20 ms`, `2.50 s`.
#[must_use]
pub fn nanos(ns: f64) -> String {
    match ns {
        ns if ns < 10.0 => format!("{ns:.2} ns"),
        ns if ns < 100.0 => format!("{ns:.1} ns"),
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e4 => format!("{:.2} µs", ns / 1e3),
        ns if ns < 1e6 => format!("{:.1} µs", ns / 1e3),
        ns if ns < 1e9 => format!("{:.2} ms", ns / 1e6),
        ns => format!("{:.2} s", ns / 1e9),
    }
}

/// A count with separated thousands: `1 234 567`.
#[must_use]
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// A rate per second: `12.3 M/s`.
#[must_use]
pub fn rate(per_second: f64) -> String {
    match per_second {
        rate if rate < 1e3 => format!("{rate:.0} /s"),
        rate if rate < 1e6 => format!("{:.1} k/s", rate / 1e3),
        rate => format!("{:.2} M/s", rate / 1e6),
    }
}

/// A figure with as many digits as are meaningful.
#[must_use]
pub fn figure(value: f64) -> String {
    let digits = match value {
        value if value < 10.0 => 2,
        value if value < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

/// How long ago something was, in its largest unit.
#[must_use]
pub fn age(age: std::time::Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// A count and its noun: `1 message`, `2 messages`.
#[must_use]
pub fn plural(count: u64, what: &str) -> String {
    format!("{} {what}{}", self::count(count), if count == 1 { "" } else { "s" })
}

/// The first bytes of a buffer, in hexadecimal and in ASCII, as in `hexdump -C`.
#[must_use]
pub fn hex(bytes: &[u8]) -> Vec<String> {
    let line = |(i, chunk): (usize, &[u8])| {
        let hex: Vec<String> = chunk.iter().map(|byte| format!("{byte:02x}")).collect();
        let shown = |&byte: &u8| if byte.is_ascii_graphic() || byte == b' ' { char::from(byte) } else { '.' };
        let text: String = chunk.iter().map(shown).collect();
        format!("{:04x}  {:47}  |{text}|", i * 16, hex.join(" "))
    };
    bytes.chunks(16).enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [0, 1023, 8192, 25_300_000, 3 << 29, u64::MAX].map(bytes),
            ["0 B", "1023 B", "8 KiB", "24.1 MiB", "1.5 GiB", "16383.9 PiB"]
        );
        assert_eq!(
            [nanos(9.04), nanos(286.6), nanos(3412.0), nanos(1.2e6)],
            ["9.04 ns", "287 ns", "3.41 µs", "1.20 ms"]
        );
        assert_eq!([count(7), count(1000), count(1_234_567)], ["7", "1 000", "1 234 567"]);
        assert_eq!([rate(12.0), rate(12_345.0), rate(12_345_678.0)], ["12 /s", "12.3 k/s", "12.35 M/s"]);
        assert_eq!([plural(1, "link"), plural(0, "link")], ["1 link", "0 links"]);
    }

    #[test]
    fn control_bytes_are_printed_as_dots() {
        assert_eq!(hex(b"a\x1b[2J")[0], format!("0000  {:47}  |a.[2J|", "61 1b 5b 32 4a"));
        assert!(hex(&[]).is_empty());
    }
}
