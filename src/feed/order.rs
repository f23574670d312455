//! What an operator orders about one key, for a host or for a fleet.

use super::wire::{Name, treatment_name, treatment_of};
use crate::engine::control::aggregate::Aggregator;
use crate::engine::control::follow::Caps;
use crate::engine::control::orders::Treat;
use crate::engine::control::treat::Treatment;
use crate::engine::time::Tick;
use crate::key::Key;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What an operator orders about one key. Of two orders the later one holds; a denial outranks all
/// others, and every order outranks what is found by traffic.
///
/// # Example
/// ```
/// use heatsink::{Treatment, feed::Order};
/// use std::time::Duration;
/// let kept = Order::set(Treatment::near()).ttl(Duration::from_millis(200));
/// let for_tonight = kept.lasts(Duration::from_secs(6 * 3600));
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
#[must_use]
pub struct Order {
    what: What,
    lasts: Option<Duration>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum What {
    Treat(Treatment, Option<Duration>),
    Untreat,
    Deny,
    Allow,
}

impl Order {
    /// Every process keeps the key near.
    pub fn pin() -> Order {
        Order::set(Treatment::Near)
    }

    /// Every process treats the key so, and no other way. What a process is not set up for it
    /// leaves undone, and says so in [`FeedStats::unobeyed`](super::FeedStats::unobeyed).
    pub fn set(treatment: Treatment) -> Order {
        Order { what: What::Treat(treatment, None), lasts: None }
    }

    /// No value of the key is served from a near cache for longer than this, nor for longer than
    /// the process's own limit.
    pub fn ttl(mut self, ttl: Duration) -> Order {
        if let What::Treat(_, of) = &mut self.what {
            *of = Some(ttl);
        }
        self
    }

    /// Takes back what [`pin`](Order::pin) or [`set`](Order::set) ordered.
    pub fn unpin() -> Order {
        Order { what: What::Untreat, lasts: None }
    }

    /// No process treats the key.
    pub fn deny() -> Order {
        Order { what: What::Deny, lasts: None }
    }

    /// Takes a denial back.
    pub fn allow() -> Order {
        Order { what: What::Allow, lasts: None }
    }

    /// Ends by itself after this long. Default: for a host, never; for a fleet, after a day. A
    /// fleet's orders last seven days at most.
    pub fn lasts(mut self, span: Duration) -> Order {
        self.lasts = Some(span);
        self
    }

    pub(super) fn span(&self) -> Option<Duration> {
        self.lasts
    }

    /// Why it cannot be carried out, if so.
    pub(super) fn check(&self, key: &Key, caps: &Caps) -> Result<(), String> {
        let parts = match self.what {
            What::Treat(Treatment::Copies { copies: n } | Treatment::Salt { slots: n }, _) => n,
            _ => 1,
        };
        if key.len() > caps.key_bytes_max {
            Err(format!("a key of {} bytes is too long", key.len()))
        } else if !(1..=caps.parts_max).contains(&parts) {
            Err(format!("{parts} copies or slots: from 1 to {} are allowed", caps.parts_max))
        } else {
            Ok(())
        }
    }

    /// Tells the group; whether there was something to take back, or room. `None`: no room.
    pub(super) fn tell(&self, group: &mut Aggregator, now: Tick, key: Key) -> Option<bool> {
        let until = self.lasts.map(|span| now.after(span));
        match self.what {
            What::Treat(treatment, ttl) => {
                let order = Treat { treatment, ttl, since: now, until };
                group.order(now, key, order).then_some(true)
            }
            What::Deny => group.deny(now, key, until).then_some(true),
            What::Untreat => Some(group.unpin(now, &key)),
            What::Allow => Some(group.allow(now, &key)),
        }
    }

    /// The denial, or what to treat the key with; `None` where something is taken back.
    pub(super) fn stored(&self, at_ms: u64, until_ms: u64) -> Option<Stored> {
        let empty = Stored { at_ms, until_ms, ..Stored::default() };
        match self.what {
            What::Treat(treatment, ttl) => {
                let (name, copies, slots) = treatment_name(treatment);
                let ttl_ms = ttl.map(super::wire::ms);
                Some(Stored { treatment: Some(name), copies, slots, ttl_ms, ..empty })
            }
            What::Deny => Some(empty),
            What::Untreat | What::Allow => None,
        }
    }

    /// Whether it is about a denial.
    pub(super) fn is_about_denial(&self) -> bool {
        matches!(self.what, What::Deny | What::Allow)
    }
}

/// An order as it is kept and sent; without a treatment it is a denial.
#[derive(Clone, Serialize, Deserialize, Default, Debug)]
#[serde(default)]
pub(crate) struct Stored {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) treatment: Option<Name>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) copies: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) slots: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ttl_ms: Option<u64>,
    pub(crate) at_ms: u64,
    pub(crate) until_ms: u64,
}

impl Stored {
    /// As it stands at `now`, which is `wall_ms`. `None` for a treatment that this version does not
    /// know.
    pub(super) fn treat(&self, now: Tick, wall_ms: u64) -> Option<Treat> {
        let treatment = treatment_of(self.treatment?, self.copies, self.slots)?;
        Some(Treat {
            treatment,
            ttl: self.ttl_ms.map(Duration::from_millis),
            since: now.before(Duration::from_millis(wall_ms.saturating_sub(self.at_ms))),
            until: Some(self.until(now, wall_ms)),
        })
    }

    pub(super) fn until(&self, now: Tick, wall_ms: u64) -> Tick {
        now.after(Duration::from_millis(self.until_ms.saturating_sub(wall_ms)))
    }
}
