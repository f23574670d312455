//! Announcements of writes from process to process.
//!
//! - **What**: what a process says on the stream when it has written a key that others may hold,
//!   and what follows from what it hears.
//! - **Invariant**: a listener that has missed one message of a writer, or heard two in the wrong
//!   order, learns so from the next one at the latest, and everything older is void at once.
//! - **Time and units**: ticks; numbers count announcements, not messages.
//! - **Bounds**: [`WRITERS_MAX`] writers, [`INTEREST_MAX`] keys of interest, [`WAITING_MAX`]
//!   announcements that wait, [`MESSAGE_BYTES_MAX`] a message. Beyond them more is voided or
//!   announced than need be, never less.
//! - **Source**: Hazelcast's near cache (sequence and identity of the source, without its
//!   tolerance of missed messages); `research/nearcache.md` 4 D and contract C14.
//!
//! An announcement is sent after the write was acknowledged, so whoever loads the key on hearing
//! it gets the new value. It carries no value: a listener forgets what it holds and voids what it
//! is loading.

use super::super::time::Tick;
use crate::key::{KEY_BYTES_MAX, Key};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Writers that a listener keeps the numbers of. One more makes it forget all of them, which
/// voids everything.
pub const WRITERS_MAX: usize = 65_536;
/// Keys that others may be interested in; beyond it every write is announced.
pub const INTEREST_MAX: usize = 262_144;
/// Announcements that wait to be sent; beyond it they are dropped, and listeners see the gap.
pub const WAITING_MAX: usize = 8_192;
/// The longest message. A key of the greatest length fits.
pub const MESSAGE_BYTES_MAX: usize = KEY_BYTES_MAX + 256;

const MAGIC: &[u8; 4] = b"hsa1";
const HEAD_BYTES: usize = 4 + 1 + 8 + 8 + 8 + 4;

/// What a message says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Said {
    /// These keys were written; the message's number is that of the first. None: the writer is
    /// alive, and this is the number that its next announcement will have.
    Wrote(Vec<Key>),
    /// The sender may hold the keys with these digests.
    Holds(Vec<u64>),
}

/// One message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// Which process says it.
    pub writer: u64,
    /// Which life of it: a later one has a higher number.
    pub epoch: u64,
    /// The number of its first announcement.
    pub seq: u64,
    /// What it says.
    pub said: Said,
}

impl Message {
    /// As it is sent.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(HEAD_BYTES + 64);
        out.put_slice(MAGIC);
        out.put_u8(u8::from(matches!(self.said, Said::Holds(_))));
        out.put_u64(self.writer);
        out.put_u64(self.epoch);
        out.put_u64(self.seq);
        match &self.said {
            Said::Wrote(keys) => {
                out.put_u32(keys.len() as u32);
                for key in keys {
                    out.put_u32(key.len() as u32);
                    out.put_slice(key);
                }
            }
            Said::Holds(digests) => {
                out.put_u32(digests.len() as u32);
                digests.iter().for_each(|digest| out.put_u64(*digest));
            }
        }
        out.freeze()
    }

    /// Reads a message; `None` for anything that `encode` does not write.
    #[must_use]
    pub fn decode(mut from: Bytes) -> Option<Message> {
        if from.len() < HEAD_BYTES || from.len() > MESSAGE_BYTES_MAX || from[..4] != MAGIC[..] {
            return None;
        }
        from.advance(4);
        let kind = from.get_u8();
        let (writer, epoch, seq) = (from.get_u64(), from.get_u64(), from.get_u64());
        let count = from.get_u32() as usize;
        let said = match kind {
            0 => {
                let mut keys = Vec::new();
                for _ in 0..count {
                    let len = from.try_get_u32().ok()? as usize;
                    if len > from.len() {
                        return None;
                    }
                    keys.push(Key::copy(&from.split_to(len)));
                }
                Said::Wrote(keys)
            }
            1 if from.len() == count.checked_mul(8)? => {
                Said::Holds((0..count).map(|_| from.get_u64()).collect())
            }
            _ => return None,
        };
        from.is_empty().then_some(Message { writer, epoch, seq, said })
    }
}

/// A digest of a key that is the same in every process (64-bit FNV-1a).
#[must_use]
pub fn digest(key: &[u8]) -> u64 {
    key.iter()
        .fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// What a process has to say.
#[derive(Clone, Debug)]
pub struct Outbox {
    writer: u64,
    epoch: u64,
    /// The number of the next announcement that is made.
    next: u64,
    /// Announcements that wait, the last of them numbered `next - 1`.
    waiting: VecDeque<Key>,
    dropped: u64,
}

impl Outbox {
    /// Nothing has been said. `epoch` grows from life to life of this writer.
    #[must_use]
    pub fn new(writer: u64, epoch: u64) -> Outbox {
        Outbox { writer, epoch, next: 1, waiting: VecDeque::new(), dropped: 0 }
    }

    /// `key` was written.
    pub fn announce(&mut self, key: Key) {
        if self.waiting.len() >= WAITING_MAX {
            // The numbers go on, so listeners find that some are missing.
            self.dropped += self.waiting.len() as u64;
            self.waiting.clear();
        }
        self.next += 1;
        self.waiting.push_back(key);
    }

    /// Announcements that were dropped.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Whether announcements wait.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The next message: as many announcements as fit, or that there are none.
    pub fn message(&mut self) -> Message {
        let seq = self.next - self.waiting.len() as u64;
        let (mut keys, mut bytes) = (Vec::new(), HEAD_BYTES);
        while let Some(key) = self.waiting.front() {
            bytes += 4 + key.len();
            if bytes > MESSAGE_BYTES_MAX {
                break;
            }
            keys.extend(self.waiting.pop_front());
        }
        Message { writer: self.writer, epoch: self.epoch, seq, said: Said::Wrote(keys) }
    }

    /// The message that says what this process may hold, as far as it fits.
    #[must_use]
    pub fn holds(&self, digests: impl IntoIterator<Item = u64>) -> Message {
        let most = (MESSAGE_BYTES_MAX - HEAD_BYTES) / 8;
        let said = Said::Holds(digests.into_iter().take(most).collect());
        Message { writer: self.writer, epoch: self.epoch, seq: self.next, said }
    }
}

/// What follows from what was heard.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Nothing.
    None,
    /// Forget these keys, and void their loads.
    Void(Vec<Key>),
    /// Something was missed: nothing older may be read.
    VoidAll,
}

/// What a process has heard.
#[derive(Clone, Debug)]
pub struct Inbox {
    own: u64,
    /// Of each writer: its life, and the number of its next announcement.
    writers: BTreeMap<u64, (u64, u64)>,
    /// Digests of keys that some listener may hold, and until when its word counts.
    interest: BTreeMap<u64, Tick>,
    /// Until then there was no room for all of them.
    flooded_until: Tick,
    /// When something was last heard, an own echo included.
    heard: Tick,
    gaps: u64,
}

impl Inbox {
    /// Has heard nothing; `own` is this process's writer, whose echoes say only that the stream
    /// is alive.
    #[must_use]
    pub fn new(own: u64, now: Tick) -> Inbox {
        let (writers, interest) = (BTreeMap::new(), BTreeMap::new());
        let flooded_until = Tick::ZERO;
        Inbox { own, writers, interest, flooded_until, heard: now, gaps: 0 }
    }

    /// How often something was missed.
    #[must_use]
    pub fn gaps(&self) -> u64 {
        self.gaps
    }

    /// When something was last heard.
    #[must_use]
    pub fn heard(&self) -> Tick {
        self.heard
    }

    /// The stream says that messages may have been lost, or it was connected again: whatever the
    /// next message of a writer is, it follows on nothing.
    pub fn gap(&mut self, now: Tick) -> Effect {
        self.writers.clear();
        (self.heard, self.gaps) = (now, self.gaps + 1);
        Effect::VoidAll
    }

    /// Takes a message. What a listener says it holds is believed for `lease`.
    pub fn handle(&mut self, now: Tick, message: Message, lease: Duration) -> Effect {
        self.heard = now;
        let Message { writer, epoch, seq, said } = message;
        let keys = match said {
            Said::Holds(digests) => {
                self.learn(now, digests, lease);
                return Effect::None;
            }
            Said::Wrote(_) if writer == self.own => return Effect::None,
            Said::Wrote(keys) => keys,
        };
        let next = seq.saturating_add(keys.len() as u64);
        let room = self.writers.len() < WRITERS_MAX;
        let follows = match self.writers.get(&writer) {
            // A new life begins at one; what the old one had not said yet is lost.
            Some((known, expected)) if *known == epoch => *expected == seq,
            Some(_) => false,
            // Since the last gap, which voided everything, nothing of this writer was heard.
            None => room,
        };
        if !room {
            self.writers.clear();
        }
        let known = self.writers.entry(writer).or_insert((epoch, next));
        *known = if (epoch, next) > *known { (epoch, next) } else { *known };
        if !follows {
            self.gaps += 1;
            return Effect::VoidAll;
        }
        if keys.is_empty() { Effect::None } else { Effect::Void(keys) }
    }

    fn learn(&mut self, now: Tick, digests: Vec<u64>, lease: Duration) {
        if self.interest.len() + digests.len() > INTEREST_MAX {
            self.interest.retain(|_, until| *until > now);
        }
        let until = now.after(lease);
        for digest in digests {
            if self.interest.len() < INTEREST_MAX || self.interest.contains_key(&digest) {
                self.interest.insert(digest, until);
            } else {
                self.flooded_until = until;
            }
        }
    }

    /// Whether a write of the key with this digest is to be announced: some listener may hold it,
    /// or more are held than there is room for.
    #[must_use]
    pub fn wants(&self, now: Tick, digest: u64) -> bool {
        self.flooded_until > now || self.interest.get(&digest).is_some_and(|until| *until > now)
    }

    /// Which of the keys that this process may hold must be said again: nobody has said so in the
    /// last two thirds of `lease`. So a whole fleet says of one key three times a lease that it is
    /// held, not each process for itself.
    #[must_use]
    pub fn unsaid(&self, now: Tick, lease: Duration, holds: impl Iterator<Item = u64>) -> Vec<u64> {
        let soon = now.after(lease / 3);
        holds.filter(|d| self.interest.get(d).is_none_or(|until| *until <= soon)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const LEASE: Duration = Duration::from_secs(30);

    fn wrote(writer: u64, epoch: u64, seq: u64, keys: &[&str]) -> Message {
        let said = Said::Wrote(keys.iter().map(|k| Key::from(*k)).collect());
        Message { writer, epoch, seq, said }
    }

    fn hear(inbox: &mut Inbox, message: Message) -> Effect {
        inbox.handle(Tick(1), message, LEASE)
    }

    fn void(keys: &[&str]) -> Effect {
        Effect::Void(keys.iter().map(|k| Key::from(*k)).collect())
    }

    #[test]
    fn own_echoes_are_ignored() {
        let mut inbox = Inbox::new(7, Tick(0));
        assert_eq!(hear(&mut inbox, wrote(7, 1, 1, &["a"])), Effect::None);
        assert_eq!(hear(&mut inbox, wrote(7, 1, 9, &["a"])), Effect::None);
        assert_eq!(inbox.heard(), Tick(1), "they show that the stream is alive");
    }

    #[test]
    fn what_follows_voids_its_keys_and_what_does_not_voids_everything() {
        let mut inbox = Inbox::new(7, Tick(0));
        assert_eq!(hear(&mut inbox, wrote(1, 1, 41, &["a", "b"])), void(&["a", "b"]));
        assert_eq!(hear(&mut inbox, wrote(1, 1, 43, &["c"])), void(&["c"]));
        assert_eq!(hear(&mut inbox, wrote(2, 1, 5, &["x"])), void(&["x"]), "another writer");
        assert_eq!(hear(&mut inbox, wrote(1, 1, 45, &["e"])), Effect::VoidAll, "44 is missing");
        assert_eq!(hear(&mut inbox, wrote(1, 1, 44, &["d"])), Effect::VoidAll, "a reorder");
        assert_eq!(hear(&mut inbox, wrote(1, 1, 46, &["f"])), void(&["f"]), "in step again");
        assert_eq!(inbox.gaps(), 2);
    }

    #[test]
    fn the_loss_of_a_writers_last_announcement_shows_at_its_next_sign_of_life() {
        let mut inbox = Inbox::new(7, Tick(0));
        hear(&mut inbox, wrote(1, 1, 1, &["a"]));
        assert_eq!(hear(&mut inbox, wrote(1, 1, 2, &[])), Effect::None);
        assert_eq!(hear(&mut inbox, wrote(1, 1, 3, &[])), Effect::VoidAll);
        assert_eq!(hear(&mut inbox, wrote(1, 1, 3, &[])), Effect::None);
    }

    #[test]
    fn another_life_of_a_writer_voids_everything_once_and_so_does_a_reconnect() {
        let mut inbox = Inbox::new(7, Tick(0));
        hear(&mut inbox, wrote(1, 1, 9, &["a"]));
        assert_eq!(hear(&mut inbox, wrote(1, 2, 1, &["a"])), Effect::VoidAll);
        assert_eq!(hear(&mut inbox, wrote(1, 2, 2, &["a"])), void(&["a"]));
        assert_eq!(hear(&mut inbox, wrote(1, 1, 10, &["a"])), Effect::VoidAll, "the old life");
        assert_eq!(inbox.gap(Tick(2)), Effect::VoidAll);
        assert_eq!(hear(&mut inbox, wrote(1, 2, 77, &["a"])), void(&["a"]), "a new beginning");
    }

    #[test]
    fn what_a_listener_holds_or_held_before_is_announced_until_its_word_is_over() {
        let mut inbox = Inbox::new(7, Tick(0));
        let holds = |digests: &[u64]| Message {
            writer: 1,
            epoch: 1,
            seq: 1,
            said: Said::Holds(digests.to_vec()),
        };
        assert!(!inbox.wants(Tick(1), 5));
        hear(&mut inbox, holds(&[5]));
        assert!(inbox.wants(Tick(1), 5) && !inbox.wants(Tick(1), 6));
        hear(&mut inbox, holds(&[6]));
        assert!(inbox.wants(Tick(1), 5), "the list before");
        assert_eq!(inbox.unsaid(Tick(2), LEASE, [5, 6, 7].into_iter()), [7]);
        let late = Tick(2).after(LEASE * 2 / 3);
        assert_eq!(inbox.unsaid(late, LEASE, [5, 6, 7].into_iter()), [5, 6, 7]);
        assert!(inbox.wants(late, 6) && !inbox.wants(Tick(2).after(LEASE), 6));
    }

    #[test]
    fn more_interest_than_there_is_room_for_announces_every_write() {
        let mut inbox = Inbox::new(7, Tick(0));
        for n in 0..=INTEREST_MAX as u64 / 4_096 {
            let said = Said::Holds((n * 4_096..(n + 1) * 4_096).collect());
            hear(&mut inbox, Message { writer: 1, epoch: 1, seq: 1, said });
        }
        assert!(inbox.interest.len() <= INTEREST_MAX && inbox.wants(Tick(2), u64::MAX));
        assert!(!inbox.wants(Tick(2).after(LEASE), u64::MAX));
    }

    #[test]
    fn what_waits_is_bounded_and_its_loss_is_a_gap() {
        let (mut outbox, mut inbox) = (Outbox::new(1, 1), Inbox::new(7, Tick(0)));
        assert_eq!(hear(&mut inbox, outbox.message()), Effect::None);
        for n in 0..=WAITING_MAX {
            outbox.announce(Key::from(format!("k{n}")));
        }
        assert_eq!(outbox.dropped(), WAITING_MAX as u64);
        assert_eq!(hear(&mut inbox, outbox.message()), Effect::VoidAll);
    }

    proptest! {
        /// Whatever is lost, doubled or turned round on the way: at the sign of life that ends it,
        /// each key has been voided by its name or with everything else after it was announced.
        #[test]
        fn no_announcement_is_ever_lost_unnoticed(
            steps in proptest::collection::vec((0u8..6, 0u8..4), 1..60),
        ) {
            let (mut outbox, mut inbox) = (Outbox::new(1, 1), Inbox::new(7, Tick(0)));
            hear(&mut inbox, outbox.message());
            let mut held: BTreeSet<Key> = BTreeSet::new();
            let mut kept: Vec<Message> = Vec::new();
            let take = |inbox: &mut Inbox, held: &mut BTreeSet<Key>, m: Message| {
                match hear(inbox, m) {
                    Effect::None => {}
                    Effect::Void(keys) => held.retain(|k| !keys.contains(k)),
                    Effect::VoidAll => held.clear(),
                }
            };
            for (what, n) in steps {
                let key = Key::from(format!("k{n}"));
                match what {
                    0 | 1 => { outbox.announce(key.clone()); held.insert(key); }
                    2 => take(&mut inbox, &mut held, outbox.message()),
                    3 => kept.push(outbox.message()),
                    4 => drop(outbox.message()),
                    _ => if let Some(late) = kept.pop() { take(&mut inbox, &mut held, late) },
                }
            }
            take(&mut inbox, &mut held, outbox.message());
            prop_assert!(outbox.is_empty());
            take(&mut inbox, &mut held, outbox.message());
            prop_assert!(held.is_empty(), "{held:?}");
        }

        #[test]
        fn a_message_reads_back_as_it_was_written(
            writer: u64, epoch: u64, seq: u64, keys: Vec<Vec<u8>>, digests: Vec<u64>, holds: bool,
        ) {
            let keys = keys.into_iter().map(Key::from).collect();
            let said = if holds { Said::Holds(digests) } else { Said::Wrote(keys) };
            let message = Message { writer, epoch, seq, said };
            prop_assert_eq!(Message::decode(message.encode()), Some(message));
        }

        #[test]
        fn bytes_from_anywhere_grow_nothing(mut bytes: Vec<u8>, count: u32) {
            prop_assert_eq!(Message::decode(bytes.clone().into()), None);
            let mut head = MAGIC.to_vec();
            head.extend([bytes.first().copied().unwrap_or(0) & 1; 25]);
            head.extend(count.to_be_bytes());
            head.append(&mut bytes);
            let decoded = Message::decode(head.clone().into());
            prop_assert!(decoded.is_none_or(|m| m.encode() == head));
        }
    }
}
