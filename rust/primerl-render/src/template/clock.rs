//! `strftime_now`, as `datetime.now().strftime` formats.

use chrono::{DateTime, Local};
use minijinja::{Error, ErrorKind, State};
use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

/// Variable with the time that the caller fixed, in microseconds since 1970; undefined where the clock is asked.
pub(super) const NOW: &str = "__primerl_now";

pub(super) fn microseconds(time: SystemTime) -> Option<i64> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    i64::try_from(since.as_micros()).ok()
}

pub(super) fn strftime_now(state: &State, format: &str) -> Result<String, Error> {
    let fixed = state
        .lookup(NOW)
        .and_then(|value| u64::try_from(value).ok());
    let now = fixed.map_or_else(SystemTime::now, |microseconds| {
        SystemTime::UNIX_EPOCH + Duration::from_micros(microseconds)
    });
    strftime(now, format).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now cannot format {format:?}"),
        )
    })
}

/// Local time without a time zone, which is what Python's `datetime.now()` has. `None` where chrono knows no such directive.
fn strftime(time: SystemTime, format: &str) -> Option<String> {
    let mut text = String::new();
    // `to_string` would panic on a directive that chrono does not know.
    write!(
        text,
        "{}",
        DateTime::<Local>::from(time)
            .naive_local()
            .format(&chrono_format(format))
    )
    .ok()?;
    Some(text)
}

// chrono's %f is nanoseconds; Python's %z and %Z are empty without a time zone.
fn chrono_format(format: &str) -> String {
    let mut out = String::with_capacity(format.len());
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        match (char, chars.clone().next()) {
            ('%', Some(directive @ ('f' | 'z' | 'Z' | '%'))) => {
                chars.next();
                out.push_str(match directive {
                    'f' => "%6f",
                    '%' => "%%",
                    _ => "",
                });
            }
            _ => out.push(char),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_as_python_does() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_micros(1_800_000_000_001_234);
        assert_eq!(strftime(time, "%f %Z%z|%%f").as_deref(), Some("001234 |%f"));
        assert_eq!(strftime(time, "%Q"), None);
        assert_eq!(strftime(time, "%d %b %Y").map(|text| text.len()), Some(11));
    }
}
