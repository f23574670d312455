//! Lists of keys that are known beforehand, as text: from a file, or from a value in the store.

use crate::control::{Control, Schedule};
use crate::error::{Error, ErrorKind, Result};
use crate::key::KEY_BYTES_MAX;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Lines of one text.
const LINES_MAX: usize = 65_536;

/// One line of a known list: a key or a prefix, and when it is in force.
///
/// A text has one JSON object to a line; empty lines and lines that begin with `#` are passed over:
///
/// ```text
/// # the final
/// {"prefix": "match:77:", "from": 1796328000, "until": 1796338800}
/// {"key": "post:9"}
/// ```
///
/// `from` and `until` are seconds since 1970; without them it is now and for good. A field that is
/// not known is an error: what is misspelt would be silently left out.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// Exactly this key.
    pub key: Option<String>,
    /// Every key that begins with this, as soon as its traffic comes near the threshold.
    pub prefix: Option<String>,
    /// In force from here on, in seconds since 1970.
    pub from: Option<u64>,
    /// In force until here.
    pub until: Option<u64>,
}

impl Known {
    /// The lines of `text`.
    ///
    /// # Errors
    /// [`Codec`](ErrorKind::Codec) names the line and what is wrong with it.
    pub fn parse(text: &str) -> Result<Vec<Known>> {
        let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let mut all = Vec::new();
        for (at, line) in lines {
            let wrong =
                |what: String| Error::not_applied(ErrorKind::Codec, format!("line {at}: {what}"));
            let known: Known = serde_json::from_str(line).map_err(|e| wrong(e.to_string()))?;
            let named = known.key.as_ref().or(known.prefix.as_ref()).map_or(0, String::len);
            let what = if known.key.is_some() == known.prefix.is_some() {
                "either a key or a prefix"
            } else if named > KEY_BYTES_MAX {
                "the key is too long"
            } else if known.until.is_some_and(|until| until <= known.from.unwrap_or(0)) {
                "it ends before it begins"
            } else if all.len() >= LINES_MAX {
                "too many lines"
            } else {
                all.push(known);
                continue;
            };
            return Err(wrong(what.into()));
        }
        Ok(all)
    }
}

/// What one schedule names, when it starts from now on, and how long it lasts.
pub(super) enum Line {
    Keys(Vec<String>, Duration, Duration),
    Prefix(String, Duration, Duration),
}

impl Line {
    /// Keys and prefixes.
    pub(super) fn len(&self) -> usize {
        match self {
            Line::Keys(keys, _, _) => keys.len(),
            Line::Prefix(_, _, _) => 1,
        }
    }
}

/// What is to be scheduled at `now`, by the wall clock. What is over already is passed over.
pub(super) fn plan(text: &str, now: Duration) -> Result<Vec<Line>> {
    // Keys of the same time are one schedule.
    let mut keys: BTreeMap<_, Vec<String>> = BTreeMap::new();
    let mut prefixes = Vec::new();
    for known in Known::parse(text)? {
        let from = known.from.map_or(now, Duration::from_secs).max(now);
        let until = known.until.map_or(Duration::MAX, Duration::from_secs);
        if until <= now {
            continue;
        }
        let when = (from - now, until - from);
        if let Some(prefix) = known.prefix {
            prefixes.push(Line::Prefix(prefix, when.0, when.1));
        }
        keys.entry(when).or_default().extend(known.key);
    }
    let keys = keys.into_iter().filter(|(_, keys)| !keys.is_empty());
    let keys = keys.map(|((starts_in, lasts), keys)| Line::Keys(keys, starts_in, lasts));
    Ok(prefixes.into_iter().chain(keys).collect())
}

impl Control<'_> {
    /// Schedules what a known list names: all of it or nothing. What is over already is passed
    /// over. The numbers take the schedules back.
    ///
    /// # Errors
    /// Those of [`Known::parse`] and of [`schedule`](Control::schedule).
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore};
    /// # let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let launch = "{\"key\": \"post:9\"}\n{\"prefix\": \"match:77:\"}";
    /// assert_eq!(hs.control().schedule_known(launch)?.len(), 2);
    /// assert_eq!(hs.control().treated(), ["post:9".into()]);
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn schedule_known(&self, text: &str) -> Result<Vec<u64>> {
        let now = Duration::from_millis(self.wall_ms());
        let mut made = Vec::new();
        for line in plan(text, now)? {
            let (schedule, starts_in, lasts) = match line {
                Line::Keys(keys, from, lasts) => (Schedule::keys(keys), from, lasts),
                Line::Prefix(prefix, from, lasts) => (Schedule::prefix(prefix), from, lasts),
            };
            match self.schedule(schedule.starts_in(starts_in).lasts(lasts)) {
                Ok(id) => made.push(id),
                Err(e) => {
                    for id in made {
                        self.cancel(id);
                    }
                    return Err(e);
                }
            }
        }
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Heatsink;
    use crate::store::MemoryStore;

    #[test]
    fn a_line_that_is_wrong_is_named() {
        for (text, what) in [
            ("{\"key\":\"a\"}\n\n{\"kye\":\"b\"}", "line 3: unknown field `kye`"),
            ("{}", "line 1: either a key or a prefix"),
            ("{\"key\":\"a\",\"prefix\":\"b\"}", "line 1: either a key or a prefix"),
            ("# ok\n{\"key\":\"a\",\"from\":5,\"until\":5}", "line 2: it ends before it begins"),
            ("nonsense", "line 1: expected"),
        ] {
            let told = Known::parse(text).unwrap_err().to_string();
            assert!(told.starts_with(what), "{told}");
        }
    }

    #[test]
    fn a_known_list_is_scheduled_whole_or_not_at_all() {
        let hs = Heatsink::new(MemoryStore::new(1)).unwrap();
        let over = "{\"key\":\"old\",\"from\":1,\"until\":2}\n{\"key\":\"new\"}";
        assert_eq!(hs.control().schedule_known(over).unwrap().len(), 1);
        assert_eq!(hs.control().treated(), ["new".into()]);
        let many = (0..1_024).map(|i| format!("{{\"prefix\":\"p{i}\"}}\n")).collect::<String>();
        assert!(hs.control().schedule_known(&many).is_err(), "one more than there may be");
        hs.control().schedule_known("{\"prefix\":\"p\"}").unwrap();
    }
}
