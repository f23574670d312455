//! How a process takes part in a feed.

use crate::Ceiling;
use crate::engine::control::aggregate;
use crate::engine::control::follow::Caps;
use crate::engine::control::treat;
use crate::error::{Error, Result};
use std::time::Duration;

/// How a process shares its traffic with its siblings, and obeys their list.
///
/// # Example
/// ```
/// # use heatsink::feed::Options;
/// let careful = Options::new().promote_at(200.0).watch_only();
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Options {
    pub(crate) promote_at: f64,
    pub(crate) ceiling: Option<Ceiling>,
    pub(crate) ttl: Duration,
    pub(crate) report_every: Duration,
    pub(crate) report: bool,
    pub(crate) obey: bool,
    pub(crate) serve: bool,
    pub(crate) caps: Caps,
    pub(crate) allowed: Vec<u32>,
    pub(crate) followers_max: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            promote_at: 50.0,
            ceiling: None,
            ttl: Duration::from_secs(5),
            report_every: Duration::from_millis(500),
            report: true,
            obey: true,
            serve: true,
            caps: Caps::default(),
            allowed: Vec::new(),
            followers_max: 256,
        }
    }
}

impl Options {
    /// The defaults.
    pub fn new() -> Options {
        Options::default()
    }

    /// A key that all processes of the group together ask for this many times a second is hot for
    /// each of them. Default: 50, as for one process; the near cache is as cheap in each.
    pub fn promote_at(mut self, per_sec: f64) -> Options {
        self.promote_at = per_sec;
        self
    }

    /// What one shard can serve; with it, the list advises copies, slots or shedding.
    /// Default: not known.
    pub fn ceiling(mut self, ceiling: Ceiling) -> Options {
        self.ceiling = Some(ceiling);
        self
    }

    /// How long a list stays in force without a heartbeat. Default: 5 s; where more than 16 follow,
    /// and heartbeats come more rarely, up to 6 s.
    pub fn ttl(mut self, ttl: Duration) -> Options {
        self.ttl = ttl;
        self
    }

    /// Follows and shows the list, and obeys nothing: what a process does stays its own decision.
    /// It reads the registry of salted counters by itself, too.
    pub fn watch_only(mut self) -> Options {
        self.obey = false;
        self
    }

    /// Obeys, and reports nothing.
    pub fn report_nothing(mut self) -> Options {
        self.report = false;
        self
    }

    /// Never serves the group: it follows whoever does.
    pub fn never_serve(mut self) -> Options {
        self.serve = false;
        self
    }

    /// What is accepted of a list, whoever sends it.
    pub fn caps(mut self, caps: Caps) -> Options {
        self.caps = caps;
        self
    }

    /// Processes of this user may take part too. Default: this process's own user only.
    pub fn allow_uid(mut self, uid: u32) -> Options {
        self.allowed.push(uid);
        self
    }

    /// Followers that this process serves at most. Default: 256.
    pub fn followers_max(mut self, followers: usize) -> Options {
        self.followers_max = followers;
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        let wrong = if !self.promote_at.is_finite() || self.promote_at <= 0.0 {
            "feed::Options::promote_at must be above zero"
        } else if self.ttl < Duration::from_secs(2) || self.ttl > self.caps.ttl_max {
            "feed::Options::ttl must be from 2 s to Caps::ttl_max"
        } else if self.followers_max == 0 {
            "feed::Options::followers_max is zero; see never_serve()"
        } else {
            return Ok(());
        };
        Err(Error::config(wrong))
    }

    pub(crate) fn aggregate(&self) -> aggregate::Options {
        aggregate::Options {
            promote_per_sec: self.promote_at,
            entries_max: self.caps.entries_max,
            treat: treat::Options { ceiling: self.ceiling, ..treat::Options::default() },
            ..aggregate::Options::default()
        }
    }
}
