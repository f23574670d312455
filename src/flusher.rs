//! The task that flushes one buffer.
//!
//! It collects the stripes, hands them to the engine's writer, and sends what that decides. It
//! belongs to the runtime of whoever started it; when it dies with it, or ends because there was
//! nothing to do, the next add starts another.

use crate::adds::count;
use crate::batch;
use crate::buffer::Buffer;
use crate::engine::control::lanes::{Ended, Flush};
use crate::engine::control::roster::Place;
use crate::engine::time::{Tick, nanos};
use crate::error::{Outcome, Result};
use crate::lanes::ask;
use crate::runtime::BoxFuture;
use crate::shared::Shared;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Intervals without an add after which the task ends.
const IDLE_INTERVALS: u32 = 20;

/// Attempts to flush after the last handle of the instance is gone.
const LAST_ATTEMPTS: u32 = 3;

/// Lanes that one flush tries in a row.
const REFUSALS: u32 = 3;

/// A writer without a lane looks for one once in this many intervals: every 30 s by default.
const SEARCH_INTERVALS: u32 = 60;

impl Buffer {
    /// One flush, with whatever has to come before it; whether there is nothing left to flush. A
    /// lane that was taken away is replaced at once.
    async fn flush(self: &Arc<Self>, shared: &Arc<Shared>) -> bool {
        for _ in 0..REFUSALS {
            let clean = self.flush_once(shared).await;
            if clean || self.core.lock().writer.fenced().is_none() {
                return clean;
            }
        }
        false
    }

    async fn flush_once(self: &Arc<Self>, shared: &Arc<Shared>) -> bool {
        let (dirty, laned, held) = {
            let mut core = self.core.lock();
            core.kicked = false;
            let dirty = self.collect(shared, &mut core).is_some();
            self.publish(&core);
            (dirty, core.laned, core.writer.held().is_some())
        };
        if !dirty && (self.core.lock().laneless.is_none() || !self.search_due(shared)) {
            return true;
        }
        if !laned {
            return self.flush_by_add(shared).await;
        }
        if !held {
            match self.find_lane(shared).await {
                Ok(true) => {}
                Ok(false) => return self.flush_by_add(shared).await,
                Err(_) => {
                    count(&shared.counters.tallies.flushes_failed, 1);
                    return false;
                }
            }
        }
        let begun = self.core.lock().writer.begin();
        let Some(flush) = begun else { return !dirty };
        let ended = self.send(shared, flush).await;
        if ended != Ended::Applied {
            count(&shared.counters.tallies.flushes_failed, 1);
        }
        self.tell(shared);
        self.core.lock().writer.unsettled().is_none()
    }

    async fn send(self: &Arc<Self>, shared: &Arc<Shared>, flush: Flush) -> Ended {
        let mut under_way = UnderWay { buffer: self, ended: Ended::Unknown };
        let name = self.lanes.name(flush.held.generation, flush.held.lane);
        count(&shared.counters.tallies.flushes, 1);
        #[cfg(feature = "testing")]
        if let Some(ended) = shared.counters.send_broken(shared, &flush, (&self.key, &name)).await {
            under_way.ended = ended;
            return ended;
        }
        let bytes = flush.value.encode().into();
        let put = shared.store.clone().put_if_newer(name, flush.version, bytes, None);
        under_way.ended = match ask(shared, put).await {
            Ok(true) => Ended::Applied,
            Ok(false) => Ended::Refused,
            Err(error) if error.is_unknown() => Ended::Unknown,
            Err(_) => Ended::NotApplied,
        };
        under_way.ended
    }

    fn search_due(&self, shared: &Arc<Shared>) -> bool {
        let laneless = self.core.lock().laneless;
        let pause = shared.options.adds.flush_every.saturating_mul(SEARCH_INTERVALS);
        laneless.is_none_or(|since| shared.clock.now().since(since) >= pause)
    }

    /// Sees to it that this writer holds a lane; false when there is none.
    async fn find_lane(self: &Arc<Self>, shared: &Arc<Shared>) -> Result<bool> {
        let fenced = self.core.lock().writer.fenced().copied();
        if let Some(held) = fenced {
            let name = self.core.lock().name.clone();
            let place = self.lanes.place_of(shared, &name).await?;
            let value = self.lanes.read_lane(shared, held.generation, held.lane).await?;
            let unknown = self.core.lock().writer.resolve(value.as_ref());
            self.lose(shared, unknown);
            self.tell(shared);
            if place == Some((held.generation, Place::Mine(held.lane))) {
                // Somebody else goes by this writer's name. Two that take one lane from each other
                // would go on for ever.
                self.core.lock().name = shared.counters.another_name(shared);
                count(&shared.counters.tallies.lanes_taken_over, 1);
            }
        }
        if !self.search_due(shared) {
            return Ok(false);
        }
        let (name, again) = {
            let core = self.core.lock();
            (core.name.clone(), core.laneless.is_some())
        };
        let claim = self.lanes.claim(shared, &name, again).await?;
        let mut core = self.core.lock();
        match &claim {
            Some(c) => {
                core.writer.claimed(c.generation, c.lane, c.incarnation, &c.value);
                core.laneless = None;
            }
            None => core.laneless = Some(shared.clock.now()),
        }
        self.publish(&core);
        Ok(claim.is_some())
    }

    /// Everything pending as one add to the plain counter under the key.
    async fn flush_by_add(self: &Arc<Self>, shared: &Arc<Shared>) -> bool {
        let begun = self.core.lock().writer.begin_add();
        let Some(amount) = begun else { return true };
        let mut under_way = AddUnderWay { buffer: self, shared, ended: Ended::Unknown };
        count(&shared.counters.tallies.flushes, 1);
        let cell = shared.counters.cell(self.hash, &self.key);
        under_way.ended = match batch::add(shared, &cell, amount).await {
            Ok(()) => Ended::Applied,
            Err(error) if error.outcome() == Outcome::Unknown => Ended::Unknown,
            Err(_) => Ended::NotApplied,
        };
        drop(under_way);
        self.tell(shared);
        self.core.lock().writer.unsettled().is_none()
    }
}

/// Ends the flush under way, also when its task is dropped.
struct UnderWay<'a> {
    buffer: &'a Buffer,
    ended: Ended,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.buffer.core.lock().writer.end(self.ended);
    }
}

struct AddUnderWay<'a> {
    buffer: &'a Buffer,
    shared: &'a Arc<Shared>,
    ended: Ended,
}

impl Drop for AddUnderWay<'_> {
    fn drop(&mut self) {
        let unknown = self.buffer.core.lock().writer.end_add(self.ended);
        self.buffer.lose(self.shared, unknown);
    }
}

/// Flushes `buffer` until there is nothing to do.
pub(crate) fn run(shared: Arc<Shared>, buffer: Arc<Buffer>) -> BoxFuture<'static, ()> {
    // Made here, so that a task that is dropped before its first poll ends like any other.
    let task = Running { shared, buffer };
    Box::pin(task.run())
}

/// The task of one buffer.
struct Running {
    shared: Arc<Shared>,
    buffer: Arc<Buffer>,
}

impl Running {
    async fn run(self) {
        let shared = &self.shared;
        let every = shared.options.adds.flush_every;
        // A phase of its own: the flushes of a fleet do not come together, also when all of
        // its processes were started at once. A jitter of each interval would add nothing but
        // delay.
        let phase = (u128::from(shared.roll()) * u128::from(nanos(every))) >> 64;
        let mut next = shared.clock.now().after(Duration::from_nanos(phase as u64 + 1));
        let mut idle = 0;
        loop {
            self.sleep_until(next).await;
            let now = shared.clock.now();
            if now >= next {
                let late = nanos(now.since(next)) / nanos(every).max(1) + 1;
                next = next.after(every.saturating_mul(u32::try_from(late).unwrap_or(u32::MAX)));
            }
            let before = self.buffer.core.lock().writer.flushes();
            let clean = self.buffer.flush(shared).await;
            let flushed = self.buffer.core.lock().writer.flushes() != before;
            idle = if clean && !flushed { idle + 1 } else { 0 };
            if self.ends(clean, idle) {
                return;
            }
        }
    }

    /// Until then, or until somebody wants a flush.
    async fn sleep_until(&self, until: Tick) {
        let wait = until.since(self.shared.clock.now());
        let mut sleep = self.shared.runtime.sleep(wait);
        poll_fn(|cx| {
            let mut core = self.buffer.core.lock();
            if core.kicked {
                return Poll::Ready(());
            }
            core.waker = Some(cx.waker().clone());
            drop(core);
            sleep.as_mut().poll(cx)
        })
        .await;
    }

    fn ends(&self, clean: bool, idle: u32) -> bool {
        let mut core = self.buffer.core.lock();
        if core.released {
            core.attempts += 1;
            return clean || core.attempts >= LAST_ATTEMPTS;
        }
        if idle < IDLE_INTERVALS && !(core.closed && clean) {
            return false;
        }
        core.running = false;
        self.buffer.publish(&core);
        if self.buffer.collect(&self.shared, &mut core).is_none() {
            return true;
        }
        // An add came just now.
        core.running = true;
        self.buffer.publish(&core);
        false
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut core = self.buffer.core.lock();
        core.running = false;
        let released = core.released;
        self.buffer.publish(&core);
        drop(core);
        if released {
            self.buffer.give_up(&self.shared);
        }
    }
}
