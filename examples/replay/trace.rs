//! The trace: read, checked row by row, held compactly, and put on a timetable.

use flate2::bufread::MultiGzDecoder;
use heatsink::Key;
use heatsink::key::KEY_BYTES_MAX;
use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

/// A longer line is no row of a trace, and must not fill the memory.
const LINE_MAX: u64 = 1 << 20;
/// Malformed rows that are shown.
const SHOWN_MAX: usize = 10;
/// Later than any clock that counts seconds, milliseconds or microseconds.
const SECONDS_MAX: f64 = 1e16;
/// Longer pauses are cut to this, in virtual seconds.
const IDLE_MAX_S: f64 = 10.0;

/// One request.
pub(crate) struct Row {
    /// Seconds as in the file, and after [`Trace::schedule`] nanoseconds since the start.
    at: f64,
    key_and_op: u32,
}

impl Row {
    pub(crate) fn at_ns(&self) -> u64 {
        self.at as u64
    }

    pub(crate) fn key(&self) -> usize {
        (self.key_and_op >> 1) as usize
    }

    pub(crate) fn is_write(&self) -> bool {
        self.key_and_op & 1 == 1
    }
}

/// How often a key is asked for.
#[derive(Clone, Copy, Default)]
pub(crate) struct Uses {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
}

#[derive(Default)]
pub(crate) struct Trace {
    pub(crate) rows: Vec<Row>,
    pub(crate) keys: Vec<Key>,
    pub(crate) uses: Vec<Uses>,
    pub(crate) malformed: u64,
    pub(crate) malformed_first: Vec<(u64, String)>,
    pub(crate) out_of_order: u64,
}

/// Reads a whole file. An error is one of the file as a whole; a bad row is only counted.
pub(crate) fn read(path: &Path) -> Result<Trace, String> {
    let file = File::open(path).map_err(|e| e.to_string())?;
    if file.metadata().is_ok_and(|m| m.is_dir()) {
        return Err("is a directory".into());
    }
    let mut plain = BufReader::with_capacity(1 << 16, file);
    let head = plain.fill_buf().map_err(|e| e.to_string())?;
    if head.starts_with(&[0x1f, 0x8b]) {
        return read_rows(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(plain)), true);
    }
    read_rows(plain, false)
}

fn read_rows(mut input: impl BufRead, gzip: bool) -> Result<Trace, String> {
    let mut trace = Trace::default();
    let mut ids = HashMap::new();
    let mut line = Vec::new();
    let mut first = true;
    for number in 1u64.. {
        line.clear();
        let got = input.by_ref().take(LINE_MAX + 1).read_until(b'\n', &mut line);
        match got {
            Ok(0) => break,
            Ok(n) if n as u64 > LINE_MAX => {
                return Err(format!("line {number} is longer than 1 MiB: this is no trace"));
            }
            Ok(_) => {}
            Err(e) if gzip && e.kind() == ErrorKind::UnexpectedEof => {
                return Err(format!("the gzip stream ends too early, after line {}", number - 1));
            }
            Err(e) if gzip => return Err(format!("broken gzip stream near line {number}: {e}")),
            Err(e) => return Err(format!("line {number}: {e}")),
        }
        let text = std::str::from_utf8(&line).map_err(|_| format!("line {number} is not UTF-8"))?;
        let text = text.trim_end_matches(['\n', '\r']);
        let text = if number == 1 { text.trim_start_matches('\u{feff}') } else { text };
        if text.trim().is_empty() {
            continue;
        }
        let header = std::mem::take(&mut first) && is_header(text);
        if header {
            continue;
        }
        match parse(text) {
            Ok((at, write, key)) => trace.push(&mut ids, at, write, &key)?,
            Err(why) => trace.reject(number, why),
        }
    }
    trace.sort();
    Ok(trace)
}

/// The first row is a header when neither its time nor its operation could be one.
fn is_header(text: &str) -> bool {
    let mut fields = text.split(',').map(|f| f.trim().trim_matches('"'));
    let time = fields.next().is_some_and(|f| f.parse::<f64>().is_ok());
    let op = fields.next().is_none_or(|f| f == "r" || f == "w");
    !time && !op
}

/// The fields of one row; quotes around a field are taken off.
fn split(text: &str) -> Result<Vec<Cow<'_, str>>, String> {
    let mut fields = Vec::new();
    let mut rest = text;
    loop {
        let Some(quoted) = rest.strip_prefix('"') else {
            let Some((field, tail)) = rest.split_once(',') else {
                fields.push(Cow::Borrowed(rest));
                return Ok(fields);
            };
            fields.push(Cow::Borrowed(field));
            rest = tail;
            continue;
        };
        let mut field = String::new();
        let mut tail = quoted;
        loop {
            let (part, after) = tail.split_once('"').ok_or("a quote is not closed")?;
            field.push_str(part);
            match after.strip_prefix('"') {
                Some(more) => {
                    field.push('"');
                    tail = more;
                }
                None => {
                    tail = after;
                    break;
                }
            }
        }
        fields.push(Cow::Owned(field));
        if tail.is_empty() {
            return Ok(fields);
        }
        rest = tail.strip_prefix(',').ok_or("text after a closing quote")?;
    }
}

fn parse(text: &str) -> Result<(f64, bool, String), String> {
    let fields = split(text)?;
    if !(3..=4).contains(&fields.len()) {
        return Err(format!("{} fields, where 3 or 4 are expected", fields.len()));
    }
    let at = match fields[0].trim().parse::<f64>() {
        Ok(at) if (0.0..=SECONDS_MAX).contains(&at) => at,
        _ => return Err(format!("{} is no time in seconds", show(&fields[0]))),
    };
    let write = match fields[1].trim() {
        "r" => false,
        "w" => true,
        other => return Err(format!("{} is neither r nor w", show(other))),
    };
    if fields[2].is_empty() {
        return Err("the key is empty".into());
    }
    if fields[2].len() > KEY_BYTES_MAX {
        return Err(format!("the key is longer than {KEY_BYTES_MAX} bytes"));
    }
    if let Some(bytes) = fields.get(3).map(|f| f.trim())
        && !bytes.is_empty()
        && bytes.parse::<u64>().is_err()
    {
        return Err(format!("{} is no number of bytes", show(bytes)));
    }
    Ok((at, write, fields[2].clone().into_owned()))
}

/// A field as it is shown in a message: escaped and not too long.
fn show(field: &str) -> String {
    let cut: String = field.chars().take(40).collect();
    if cut.len() < field.len() { format!("{cut:?}…") } else { format!("{cut:?}") }
}

impl Trace {
    fn push(
        &mut self,
        ids: &mut HashMap<Key, u32>,
        at: f64,
        write: bool,
        key: &str,
    ) -> Result<(), String> {
        let key = Key::copy(key.as_bytes());
        let id = match ids.get(&key) {
            Some(&id) => id,
            None => {
                let id = u32::try_from(self.keys.len()).ok().filter(|id| *id < u32::MAX >> 1);
                let id = id.ok_or("more than two billion keys")?;
                self.keys.push(key.clone());
                self.uses.push(Uses::default());
                ids.insert(key, id);
                id
            }
        };
        let uses = &mut self.uses[id as usize];
        *(if write { &mut uses.writes } else { &mut uses.reads }) += 1;
        let early = self.rows.last().is_some_and(|last| at < last.at);
        self.out_of_order += u64::from(early);
        self.rows.push(Row { at, key_and_op: id << 1 | u32::from(write) });
        Ok(())
    }

    fn reject(&mut self, line: u64, why: String) {
        self.malformed += 1;
        if self.malformed_first.len() < SHOWN_MAX {
            self.malformed_first.push((line, why));
        }
    }

    fn sort(&mut self) {
        if self.out_of_order > 0 {
            self.rows.sort_by(|a, b| a.at.total_cmp(&b.at));
        }
    }

    /// Turns the file's times into virtual nanoseconds from the start. Rows of one time are spread
    /// over the second that follows, or up to the next time when that comes earlier. Returns the
    /// idle seconds that were cut.
    pub(crate) fn schedule(&mut self, speed: f64) -> f64 {
        let (mut now, mut last, mut skipped) = (0.0, 0.0, 0.0);
        let start = self.rows.first().map_or(0.0, |r| r.at);
        let mut from = 0;
        while from < self.rows.len() {
            let at = self.rows[from].at;
            let len = self.rows[from..].iter().take_while(|r| r.at == at).count();
            let room = self.rows.get(from + len).map_or(1.0, |next| (next.at - at).min(1.0));
            for i in 0..len {
                let due = (at - start + room * i as f64 / len as f64) / speed;
                let pause = due - last;
                now += pause.min(IDLE_MAX_S);
                skipped += (pause - IDLE_MAX_S).max(0.0);
                last = due;
                self.rows[from + i].at = now * 1e9;
            }
            from += len;
        }
        skipped
    }

    /// The most used keys by a measure; those that it gives nothing for are left out.
    pub(crate) fn top(&self, count: usize, measure: impl Fn(&Uses) -> u64) -> Vec<usize> {
        let mut all: Vec<usize> =
            (0..self.keys.len()).filter(|&k| measure(&self.uses[k]) > 0).collect();
        all.sort_by_key(|&k| (std::cmp::Reverse(measure(&self.uses[k])), k));
        all.truncate(count);
        all
    }
}
