//! The hot list, for those who look and for those who follow.

use crate::call;
use crate::engine::control::hotlist::HotList;
use crate::engine::control::merge::{Limits, Merge, Merged, Report};
use crate::error::{Error, ErrorKind, Result};
use crate::heatsink::Heatsink;
use crate::shared::Shared;
use parking_lot::Mutex;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// Followers of one instance; a cap like every other.
const FOLLOWERS_MAX: usize = 1_024;

/// Keys in one report.
const REPORT_KEYS_MAX: usize = 256;

/// The window that reports are brought to when they are added up.
const MERGE_WINDOW: Duration = Duration::from_secs(1);

impl Heatsink {
    /// The keys that stand out now: what the service asked for, what is done about each, by whose
    /// word, and what it saved.
    ///
    /// # Cost
    /// Store operations: 0. A short lock that no request takes.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore};
    /// # let hs = Heatsink::new(MemoryStore::new(8))?;
    /// for hot in hs.hot_list().entries {
    ///     println!("{hot}");
    /// }
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    #[must_use]
    pub fn hot_list(&self) -> HotList {
        let shared = self.shared();
        shared.steering.lock().hot_list(shared.clock.now())
    }

    /// Follows the hot list: each change of who is on it, or of what is done about a key.
    ///
    /// # Errors
    /// [`Limit`](ErrorKind::Limit) when 1,024 follow already.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, Treatment, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let mut changes = hs.follow_hot_list()?;
    /// assert!(changes.next().await.unwrap().entries.is_empty());
    /// hs.control().pin("post:9", Treatment::near())?;
    /// assert_eq!(changes.next().await.unwrap().entries[0].key, "post:9".into());
    /// hs.shutdown().await;
    /// assert!(changes.next().await.is_none());
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn follow_hot_list(&self) -> Result<HotListChanges> {
        let shared = self.shared().clone();
        let id = shared.followers.join().ok_or_else(|| {
            let text = format!("{FOLLOWERS_MAX} followers of the hot list are there already");
            Error::not_applied(ErrorKind::Limit, text)
        })?;
        Ok(HotListChanges { shared, id, seen: None })
    }

    /// The last finished window of this handle's own traffic, for a merge with other reports.
    #[must_use]
    pub fn report(&self) -> Option<Report> {
        self.shared().steering.lock().report(REPORT_KEYS_MAX)
    }

    /// The `n` hottest keys of several handles together, with bounds, per second: a process that
    /// wraps two stores, or one handle per worker.
    #[must_use]
    pub fn hottest_of<'a>(
        handles: impl IntoIterator<Item = &'a Heatsink>,
        n: usize,
    ) -> Vec<Merged> {
        let mut merge = Merge::new(MERGE_WINDOW, Limits::default());
        for report in handles.into_iter().filter_map(Heatsink::report) {
            // A report of our own sketch contradicts nothing; one too many is left out.
            let _ = merge.add(&report);
        }
        let mut ranked = merge.ranked();
        ranked.truncate(n);
        ranked
    }
}

/// The hot list as it changes. See [`Heatsink::follow_hot_list`].
pub struct HotListChanges {
    shared: Arc<Shared>,
    id: u64,
    seen: Option<u64>,
}

impl HotListChanges {
    /// The list as it stands, at the first call; then the list after the next change. A slow
    /// follower gets only the newest. `None` after [`Heatsink::shutdown`].
    ///
    /// # Cancel safety
    /// Dropping the future loses no change: the next call returns it.
    pub async fn next(&mut self) -> Option<HotList> {
        poll_fn(|cx| {
            let steering = self.shared.steering.lock();
            let version = Some(steering.version());
            if self.seen != version {
                self.seen = version;
                return Poll::Ready(Some(steering.hot_list(self.shared.clock.now())));
            }
            // Under the lock: a change that comes now finds the waker.
            let (open, old) = self.shared.followers.wait(self.id, cx.waker());
            drop(steering);
            drop(old);
            if open { Poll::Pending } else { Poll::Ready(None) }
        })
        .await
    }
}

impl Drop for HotListChanges {
    fn drop(&mut self) {
        self.shared.followers.leave(self.id);
    }
}

impl fmt::Debug for HotListChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HotListChanges").field("seen", &self.seen).finish()
    }
}

/// Those who follow the hot list.
#[derive(Default)]
pub(crate) struct Followers(Mutex<Seats>);

#[derive(Default)]
struct Seats {
    made: u64,
    closed: bool,
    seats: Vec<(u64, Option<Waker>)>,
}

impl Followers {
    fn join(&self) -> Option<u64> {
        let mut all = self.0.lock();
        if all.seats.len() >= FOLLOWERS_MAX {
            return None;
        }
        all.made += 1;
        let id = all.made;
        all.seats.push((id, None));
        Some(id)
    }

    /// False when nothing will change any more; and the waker that was there, to be dropped after
    /// all locks are released: it may own anything, another follower too.
    fn wait(&self, id: u64, waker: &Waker) -> (bool, Option<Waker>) {
        let mut all = self.0.lock();
        let seat = all.seats.iter_mut().find(|(seat, _)| *seat == id);
        let old = seat.and_then(|(_, seat)| seat.replace(waker.clone()));
        (!all.closed, old)
    }

    fn leave(&self, id: u64) {
        let mut all = self.0.lock();
        let at = all.seats.iter().position(|(seat, _)| *seat == id);
        let gone = at.map(|at| all.seats.swap_remove(at));
        drop(all);
        drop(gone);
    }

    /// Wakes all. Not under the lock of the steering: a waker may run anything.
    pub(crate) fn wake(&self) {
        let wakers: Vec<Waker> =
            self.0.lock().seats.iter_mut().filter_map(|(_, seat)| seat.take()).collect();
        call::each(wakers, Waker::wake);
    }

    /// Nothing will change any more.
    pub(crate) fn close(&self) {
        self.0.lock().closed = true;
        self.wake();
    }
}
