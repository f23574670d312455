//! What goes over the sockets and through the store: JSON, one object to a line.
//!
//! Every line is an object with one field, whose name says what it is: `{"list": {…}}`. Numbers
//! that count are whole, durations are in milliseconds, a key is a string, or `{"hex": "…"}` where
//! its bytes are no UTF-8. Fields that a reader does not know are passed over.
//!
//! A line has a greatest length on either side; what is longer ends the connection before it is
//! held in memory. Nothing is allocated beyond what the line itself holds.

use crate::engine::control::aggregate::From as Reporter;
use crate::engine::control::fleet::{Edition, FleetKey, FleetList, Heartbeat};
use crate::engine::control::follow::Refusal;
use crate::engine::control::hotlist::Rule;
use crate::engine::control::merge::{Report, ReportEntry, ReportKey};
use crate::engine::control::sketch::KEY_PREFIX_BYTES;
use crate::engine::control::treat::Treatment;
use crate::key::Key;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::time::Duration;

/// The longest line that a follower reads: the longest list, with long keys and reasons.
pub(crate) const LIST_LINE_MAX: usize = 8 << 20;

/// The longest line that the serving process, or the aggregator, reads: a report.
pub(crate) const REPORT_LINE_MAX: usize = 256 << 10;

/// One line.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    /// A follower's first.
    Hello(Hello),
    /// A list with new verdicts.
    List(List),
    /// The list in force stands.
    Beat(Beat),
    /// The list in force with present rates, for those who asked.
    Rates(List),
    /// The list in force stands, and so does all that the last beat of this connection said.
    Stands(Stands),
    /// A beat as it goes through the store: the lease, and what is pushed when nothing is new.
    Lease(Lease),
    /// What a process asked its store for.
    Report(ReportLine),
    /// It asked for nothing.
    Quiet(Quiet),
    /// An operator has ordered something: the document has this version.
    Ordered(u64),
    /// A follower's token: it wants to hear of the registry's root, as read after this came.
    Ask(u64),
    /// A follower's token, and the root as it was read after that.
    Root(u64, String),
    /// This list is applied.
    Ack(Version),
    /// This list is refused, and why.
    Nack(Nack),
}

#[derive(Serialize, Deserialize, Default, Debug)]
#[serde(default)]
pub(crate) struct Hello {
    pub(crate) pid: u32,
    /// Whether to send present rates every second.
    pub(crate) rates: bool,
    /// The first token. Who does not understand it passes it over, and is not asked again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ask: Option<u64>,
}

#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Version {
    pub(crate) incarnation: u64,
    pub(crate) version: u64,
}

#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Nack {
    pub(crate) incarnation: u64,
    pub(crate) version: u64,
    pub(crate) reason: String,
}

#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct List {
    issuer: u64,
    pub(crate) incarnation: u64,
    pub(crate) version: u64,
    ttl_ms: u64,
    sent_ms: u64,
    entries: Vec<Entry>,
    #[serde(default)]
    denied: Vec<WireKey>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    denied_above: Vec<WireKey>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    denied_until_ms: Vec<(WireKey, u64)>,
}

#[derive(Serialize, Deserialize, Debug)]
struct Entry {
    key: WireKey,
    rule: Name,
    treatment: Option<Name>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    copies: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slots: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    advice: Option<Advice>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ttl_ms: Option<u64>,
    reads_per_sec: f64,
    writes_per_sec: f64,
    lower_bound_per_sec: f64,
    #[serde(default)]
    saved_per_sec: f64,
    share: f64,
    #[serde(default)]
    reporters: u32,
    hot_for_ms: u64,
    #[serde(default)]
    reason: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    above: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    until_ms: Option<u64>,
}

#[derive(Serialize, Deserialize, Debug)]
struct Advice {
    treatment: Name,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    copies: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slots: Option<u32>,
}

#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Beat {
    issuer: u64,
    incarnation: u64,
    version: u64,
    ttl_ms: u64,
    sent_ms: u64,
    canary_ms: u64,
    interval_ms: u64,
    report_every_ms: u64,
    #[serde(default)]
    quiet_every_ms: u64,
    floor_per_sec: f64,
    #[serde(default)]
    reports_stored: bool,
    #[serde(default)]
    channels: u64,
}

/// Incarnation and version of the list, when this was sent, and the canary.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Stands(u64, u64, u64, u64);

/// Issuer, incarnation, version, time to live, when it was sent, canary, interval, quiet interval,
/// floor, whether reports are stored, channels. Durations and times in milliseconds.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Lease(u64, u64, u64, u64, u64, u64, u64, u64, f64, u8, u64);

/// Process, incarnation, window, and when it was sent.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Quiet(u64, u64, u64, u64);

#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct ReportLine {
    #[serde(default)]
    process: u64,
    incarnation: u64,
    window: u64,
    sent_ms: u64,
    capacity: u32,
    floor: u64,
    one_in: u32,
    duration_us: u64,
    total: u64,
    /// Key, count, error, writes, loads.
    keys: Vec<(WireKey, u64, u64, u64, u64)>,
}

/// A rule or a treatment; an empty name is one that this version does not know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Name(&'static str);

const NAMES: [&str; 7] = ["near", "copies", "salt", "shed", "detected", "pinned", "scheduled"];

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.0)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
        from.deserialize_str(NameVisitor)
    }
}

struct NameVisitor;

impl Visitor<'_> for NameVisitor {
    type Value = Name;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, text: &str) -> Result<Name, E> {
        Ok(Name(NAMES.into_iter().find(|name| *name == text).unwrap_or_default()))
    }
}

/// A key's bytes.
#[derive(Debug)]
pub(crate) struct WireKey(pub(crate) Vec<u8>);

impl Serialize for WireKey {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if let Ok(text) = std::str::from_utf8(&self.0) {
            return to.serialize_str(text);
        }
        let hex: String = self.0.iter().map(|b| format!("{b:02x}")).collect();
        let mut map = to.serialize_map(Some(1))?;
        map.serialize_entry("hex", &hex)?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for WireKey {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<WireKey, D::Error> {
        from.deserialize_any(KeyVisitor)
    }
}

struct KeyVisitor;

impl<'de> Visitor<'de> for KeyVisitor {
    type Value = WireKey;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, or {\"hex\": \"…\"}")
    }

    fn visit_str<E>(self, text: &str) -> Result<WireKey, E> {
        Ok(WireKey(text.as_bytes().to_vec()))
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<WireKey, M::Error> {
        let Some((name, hex)) = map.next_entry::<String, String>()? else {
            return Err(M::Error::custom("a key without bytes"));
        };
        let bytes = if name == "hex" { from_hex(&hex) } else { None };
        let more = map.next_entry::<String, String>()?.is_some();
        bytes
            .filter(|_| !more)
            .map(WireKey)
            .ok_or_else(|| M::Error::custom("a key that is not hex"))
    }
}

fn from_hex(hex: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| char::from(b).to_digit(16).map(|d| d as u8);
    let pair = |pair: &[u8]| Some(digit(pair[0])? << 4 | digit(pair[1])?);
    if !hex.len().is_multiple_of(2) {
        return None;
    }
    hex.as_bytes().chunks_exact(2).map(pair).collect()
}

/// Milliseconds, cut to what a list may ask for.
pub(crate) fn ms(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn treatment_name(treatment: Treatment) -> (Name, Option<u32>, Option<u32>) {
    let (name, copies, slots) = match treatment {
        Treatment::Near => ("near", None, None),
        Treatment::Copies { copies } => ("copies", Some(copies), None),
        Treatment::Salt { slots } => ("salt", None, Some(slots)),
        Treatment::Shed => ("shed", None, None),
    };
    (Name(name), copies, slots)
}

pub(crate) fn treatment_of(
    name: Name,
    copies: Option<u32>,
    slots: Option<u32>,
) -> Option<Treatment> {
    Some(match name.0 {
        "near" => Treatment::Near,
        "copies" => Treatment::Copies { copies: copies? },
        "salt" => Treatment::Salt { slots: slots? },
        "shed" => Treatment::Shed,
        _ => return None,
    })
}

impl Entry {
    fn of(entry: &FleetKey) -> Entry {
        let named = entry.treatment.map(treatment_name);
        Entry {
            key: WireKey(entry.key.to_vec()),
            rule: Name(match entry.rule {
                Rule::Pinned => "pinned",
                Rule::Scheduled => "scheduled",
                _ => "detected",
            }),
            treatment: named.map(|n| n.0),
            copies: named.and_then(|n| n.1),
            slots: named.and_then(|n| n.2),
            advice: entry.advice.map(treatment_name).map(|(name, copies, slots)| Advice {
                treatment: name,
                copies,
                slots,
            }),
            ttl_ms: entry.ttl.map(ms),
            reads_per_sec: entry.reads_per_sec,
            writes_per_sec: entry.writes_per_sec,
            lower_bound_per_sec: entry.lower_bound_per_sec,
            saved_per_sec: entry.saved_per_sec,
            share: entry.share,
            reporters: entry.reporters,
            hot_for_ms: ms(entry.hot_for),
            reason: entry.reason.clone(),
            above: entry.above,
            until_ms: entry.until_ms,
        }
    }

    /// `None` for a rule or a treatment that this version does not know.
    fn read(self) -> Option<FleetKey> {
        let treatment = match self.treatment {
            Some(name) => Some(treatment_of(name, self.copies, self.slots)?),
            None => None,
        };
        let rule = match self.rule.0 {
            "pinned" => Rule::Pinned,
            "scheduled" => Rule::Scheduled,
            "detected" => Rule::Detected,
            _ => return None,
        };
        let advice = self.advice.and_then(|a| treatment_of(a.treatment, a.copies, a.slots));
        Some(FleetKey {
            treatment,
            advice,
            ttl: self.ttl_ms.map(Duration::from_millis),
            reads_per_sec: self.reads_per_sec,
            writes_per_sec: self.writes_per_sec,
            lower_bound_per_sec: self.lower_bound_per_sec,
            saved_per_sec: self.saved_per_sec,
            share: self.share,
            reporters: self.reporters,
            hot_for: Duration::from_millis(self.hot_for_ms),
            reason: self.reason,
            above: self.above,
            until_ms: self.until_ms,
            ..FleetKey::named(Key::from(self.key.0), rule, Treatment::Near)
        })
    }
}

impl List {
    pub(crate) fn of(list: &FleetList) -> List {
        List {
            issuer: list.issuer,
            incarnation: list.edition.incarnation,
            version: list.edition.version,
            ttl_ms: ms(list.ttl),
            sent_ms: list.sent_ms,
            entries: list.entries.iter().map(Entry::of).collect(),
            denied: list.denied.iter().map(|key| WireKey(key.to_vec())).collect(),
            denied_above: list.denied_above.iter().map(|key| WireKey(key.to_vec())).collect(),
            denied_until_ms: list
                .denied_until_ms
                .iter()
                .map(|(key, ms)| (WireKey(key.to_vec()), *ms))
                .collect(),
        }
    }

    pub(crate) fn edition(&self) -> Edition {
        Edition { incarnation: self.incarnation, version: self.version }
    }

    /// The list, without what this version does not know; how many entries that were.
    pub(crate) fn read(self) -> (FleetList, usize) {
        let (edition, before) = (self.edition(), self.entries.len());
        let entries: Vec<FleetKey> = self.entries.into_iter().filter_map(Entry::read).collect();
        let skipped = before - entries.len();
        let list = FleetList {
            issuer: self.issuer,
            edition,
            ttl: Duration::from_millis(self.ttl_ms),
            sent_ms: self.sent_ms,
            entries,
            denied: self.denied.into_iter().map(|key| Key::from(key.0)).collect(),
            denied_above: self.denied_above.into_iter().map(|key| Key::from(key.0)).collect(),
            denied_until_ms: self
                .denied_until_ms
                .into_iter()
                .map(|(key, ms)| (Key::from(key.0), ms))
                .collect(),
        };
        (list, skipped)
    }
}

impl Beat {
    pub(crate) fn of(beat: &Heartbeat) -> Beat {
        Beat {
            issuer: beat.issuer,
            incarnation: beat.edition.incarnation,
            version: beat.edition.version,
            ttl_ms: ms(beat.ttl),
            sent_ms: beat.sent_ms,
            canary_ms: beat.canary_ms,
            interval_ms: ms(beat.interval),
            report_every_ms: ms(beat.report_every),
            quiet_every_ms: ms(beat.quiet_every),
            floor_per_sec: rounded(beat.floor_per_sec),
            reports_stored: beat.reports_stored,
            channels: beat.channels,
        }
    }

    pub(crate) fn read(self) -> Heartbeat {
        Heartbeat {
            issuer: self.issuer,
            edition: Edition { incarnation: self.incarnation, version: self.version },
            ttl: Duration::from_millis(self.ttl_ms),
            sent_ms: self.sent_ms,
            canary_ms: self.canary_ms,
            interval: Duration::from_millis(self.interval_ms),
            report_every: Duration::from_millis(self.report_every_ms),
            quiet_every: Duration::from_millis(self.quiet_every_ms),
            floor_per_sec: floor(self.floor_per_sec),
            reports_stored: self.reports_stored,
            channels: self.channels,
        }
    }
}

/// A floor need not be known more exactly; rounded down, it leaves nothing out.
fn rounded(floor: f64) -> f64 {
    if floor > 1e9 { floor.floor() } else { (floor * 1e3).floor() / 1e3 }
}

fn floor(floor: f64) -> f64 {
    if floor.is_finite() { floor.max(0.0) } else { 0.0 }
}

impl Stands {
    pub(crate) fn of(beat: &Heartbeat) -> Stands {
        let Edition { incarnation, version } = beat.edition;
        Stands(incarnation, version, beat.sent_ms, beat.canary_ms)
    }

    /// `last` with what this says.
    pub(crate) fn read(self, last: &Heartbeat) -> Heartbeat {
        let Stands(incarnation, version, sent_ms, canary_ms) = self;
        Heartbeat { edition: Edition { incarnation, version }, sent_ms, canary_ms, ..*last }
    }
}

impl Lease {
    pub(crate) fn of(beat: &Heartbeat) -> Lease {
        Lease(
            beat.issuer,
            beat.edition.incarnation,
            beat.edition.version,
            ms(beat.ttl),
            beat.sent_ms,
            beat.canary_ms,
            ms(beat.interval),
            ms(beat.quiet_every),
            rounded(beat.floor_per_sec),
            u8::from(beat.reports_stored),
            beat.channels,
        )
    }

    pub(crate) fn read(self) -> Heartbeat {
        let interval = Duration::from_millis(self.6);
        Heartbeat {
            issuer: self.0,
            edition: Edition { incarnation: self.1, version: self.2 },
            ttl: Duration::from_millis(self.3),
            sent_ms: self.4,
            canary_ms: self.5,
            interval,
            report_every: interval,
            quiet_every: Duration::from_millis(self.7),
            floor_per_sec: floor(self.8),
            reports_stored: self.9 != 0,
            channels: self.10,
        }
    }
}

impl Quiet {
    pub(crate) fn read(self) -> (Reporter, u64, Report) {
        let Quiet(process, incarnation, window, sent_ms) = self;
        (Reporter { process, incarnation, window }, sent_ms, Report::nothing())
    }
}

/// The message of a report: the short one where there is nothing to say.
pub(crate) fn report(from: Reporter, sent_ms: u64, report: &Report) -> Message {
    if report.is_nothing() {
        return Message::Quiet(Quiet(from.process, from.incarnation, from.window, sent_ms));
    }
    Message::Report(ReportLine::of(from, sent_ms, report))
}

/// Who reports, when it was sent, and what; `None` for any other message.
pub(crate) fn read_report(message: Message) -> Option<(Reporter, u64, Report)> {
    match message {
        Message::Report(report) => Some(report.read()),
        Message::Quiet(quiet) => Some(quiet.read()),
        _ => None,
    }
}

impl ReportLine {
    pub(crate) fn of(from: Reporter, sent_ms: u64, report: &Report) -> ReportLine {
        let key =
            |e: &ReportEntry| (WireKey(e.key.bytes.to_vec()), e.count, e.error, e.writes, e.loads);
        ReportLine {
            process: from.process,
            incarnation: from.incarnation,
            window: from.window,
            sent_ms,
            capacity: report.capacity,
            floor: report.floor,
            one_in: report.one_in,
            duration_us: u64::try_from(report.duration.as_micros()).unwrap_or(u64::MAX),
            total: report.total,
            keys: report.entries.iter().map(key).collect(),
        }
    }

    /// Who reports, when it was sent, and what. Only whole keys are known beyond a process.
    pub(crate) fn read(self) -> (Reporter, u64, Report) {
        let (process, incarnation, window) = (self.process, self.incarnation, self.window);
        let whole = |key: &WireKey| key.0.len() < KEY_PREFIX_BYTES;
        let entries = self.keys.into_iter().filter(|k| whole(&k.0)).map(
            |(key, count, error, writes, loads)| ReportEntry {
                key: ReportKey::new(&key.0, 0),
                count,
                error,
                writes,
                loads,
            },
        );
        let report = Report {
            capacity: self.capacity,
            floor: self.floor,
            one_in: self.one_in,
            duration: Duration::from_micros(self.duration_us),
            total: self.total,
            entries: entries.collect(),
        };
        (Reporter { process, incarnation, window }, self.sent_ms, report)
    }
}

/// The message as a line.
pub(crate) fn line(message: &Message) -> Vec<u8> {
    // These types have no map with odd keys and no failing implementation.
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    line.push(b'\n');
    line
}

/// The message on a line.
pub(crate) fn read(line: &[u8]) -> Result<Message, Refusal> {
    serde_json::from_slice(line).map_err(|_| Refusal::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_reads_back_as_it_was_written() {
        let mut near = FleetKey::named(Key::from("post:\"9\"\n"), Rule::Detected, Treatment::Near);
        near.reason = "160/s ± 22/s".into();
        near.above = true;
        near.until_ms = Some(11);
        near.ttl = Some(Duration::from_millis(700));
        near.advice = Some(Treatment::Copies { copies: 3 });
        let salt = Treatment::Salt { slots: 16 };
        let odd = FleetKey::named(Key::from(vec![0xff, 0, b'\n']), Rule::Pinned, salt);
        let list = FleetList {
            issuer: 7,
            edition: Edition { incarnation: 8, version: 9 },
            ttl: Duration::from_secs(5),
            sent_ms: 10,
            entries: vec![near, odd],
            denied: vec![Key::from("no")],
            denied_above: vec![Key::from("no")],
            denied_until_ms: vec![(Key::from("no"), 12)],
        };
        let line = line(&Message::List(List::of(&list)));
        assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1, "one line");
        let Ok(Message::List(back)) = read(&line) else { panic!() };
        assert_eq!(back.read(), (list, 0));
    }

    #[test]
    fn what_is_short_on_the_wire_reads_back_whole() {
        let beat = Heartbeat {
            issuer: (1 << 53) - 1,
            edition: Edition { incarnation: 1_796_061_600_000, version: 9 },
            ttl: Duration::from_secs(5),
            sent_ms: 1_796_061_600_001,
            canary_ms: 1_796_061_600_002,
            interval: Duration::from_millis(500),
            report_every: Duration::from_millis(500),
            quiet_every: Duration::from_secs(2),
            floor_per_sec: 13.333,
            reports_stored: true,
            channels: 4,
        };
        let lease = line(&Message::Lease(Lease::of(&beat)));
        assert!(lease.len() < 110, "{}", lease.len());
        let Ok(Message::Lease(back)) = read(&lease) else { panic!() };
        assert_eq!(back.read(), beat);
        let later = Heartbeat { sent_ms: 1_796_061_600_501, ..beat };
        let stands = line(&Message::Stands(Stands::of(&later)));
        assert!(stands.len() < 64, "{}", stands.len());
        let Ok(Message::Stands(back)) = read(&stands) else { panic!() };
        assert_eq!(back.read(&beat), later);
        let from = Reporter { process: beat.issuer, incarnation: beat.sent_ms, window: 7 };
        let quiet = line(&report(from, beat.sent_ms, &Report::nothing()));
        assert!(quiet.len() < 70, "{}", quiet.len());
        let told = read_report(read(&quiet).unwrap());
        assert_eq!(told, Some((from, beat.sent_ms, Report::nothing())));
        assert!(read(br#"{"stands":[1,2,3]}"#).is_err() && read(br#"{"lease":[1]}"#).is_err());
    }

    #[test]
    fn what_a_later_version_may_say_is_passed_over_and_counted() {
        let text = r#"{"list":{"issuer":1,"incarnation":2,"version":3,"ttl_ms":4,"sent_ms":5,
            "shade":"blue","entries":[{"key":"a","rule":"detected","treatment":"freeze",
            "reads_per_sec":1,"writes_per_sec":0,"lower_bound_per_sec":1,"share":0.5,
            "hot_for_ms":7}]}}"#;
        let Ok(Message::List(list)) = read(text.as_bytes()) else { panic!() };
        let (list, skipped) = list.read();
        assert_eq!((list.entries.len(), skipped), (0, 1));
        assert!(read(br#"{"shout":{}}"#).is_err() && read(b"{}").is_err() && read(b"").is_err());
        assert!(serde_json::from_str::<WireKey>(r#"{"hex":"0g"}"#).is_err());
    }
}
