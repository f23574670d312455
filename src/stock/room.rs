//! A waiting room: callers are let in at the rate that the rows behind it can take.

use crate::call::each;
use crate::engine::data::room::{Came, Room};
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::heatsink::Heatsink;
use crate::shared::Shared;
use crate::sync::Mutex;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// How much is made up for when a timer fires late.
const LATE: Duration = Duration::from_millis(10);

/// The most places of a room.
const PLACES_MAX: usize = 1 << 24;

impl Heatsink {
    /// A waiting room with `places` that lets in `per_sec` callers a second, first come, first
    /// served. At the opening and after a pause too: nobody earns a burst by not coming. What a late
    /// timer has missed is made up for, a hundredth of a second of it.
    ///
    /// It is this process's own: with n processes give each an n-th of what the rows can take.
    ///
    /// # Errors
    /// [`Config`](ErrorKind::Config): no callers a second, no places, or more than 16 million.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let room = hs.waiting_room(12_800, 20_000)?;
    /// let mut ticket = room.enter()?; // an error with a time to come back when all places are taken
    /// println!("{} before you, about {:?}", ticket.position(), ticket.estimate());
    /// ticket.admitted().await; // dropped instead: those behind move up
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn waiting_room(&self, per_sec: u32, places: usize) -> Result<WaitingRoom> {
        if per_sec == 0 || !(1..=PLACES_MAX).contains(&places) {
            return Err(Error::config("a waiting room needs a rate and 1 to 16,777,216 places"));
        }
        let room = Room::new(places, Duration::from_secs(1) / per_sec, LATE);
        let shared = self.shared().clone();
        let keeping = AtomicBool::new(false);
        Ok(WaitingRoom(Arc::new(Inner { shared, room: Mutex::new(room), keeping })))
    }
}

/// A queue that lets callers in at a fixed rate. Made by [`Heatsink::waiting_room`].
#[derive(Clone)]
pub struct WaitingRoom(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    room: Mutex<Room<Waker>>,
    /// A task lets callers in.
    keeping: AtomicBool,
}

/// Lets callers in until nobody waits. When its runtime goes away, the next poll of a caller
/// starts another.
struct Keeper {
    room: Arc<Inner>,
    ended: bool,
}

impl Keeper {
    fn start(room: &Arc<Inner>) {
        if room.keeping.swap(true, Ordering::AcqRel) {
            return;
        }
        // Made here, so that a task that is dropped before its first poll ends like any other.
        let keeper = Keeper { room: room.clone(), ended: false };
        room.shared.runtime.spawn(Box::pin(keeper.keep()));
    }

    async fn keep(mut self) {
        let shared = self.room.shared.clone();
        loop {
            let now = shared.clock.precise();
            let (woken, until) = {
                let mut room = self.room.room.lock();
                let woken = room.admit(now);
                let until = room.next_at();
                if until.is_none() {
                    // Under the lock: whoever comes from now on starts another.
                    self.room.keeping.store(false, Ordering::Release);
                    self.ended = true;
                }
                (woken, until)
            };
            // Outside the lock: a waker is the caller's own code.
            each(woken, Waker::wake);
            let Some(until) = until else { return };
            shared.runtime.sleep(until.since(now)).await;
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if !self.ended {
            self.room.keeping.store(false, Ordering::Release);
        }
    }
}

/// A place in a waiting room. Dropping it leaves the room.
pub struct WaitingTicket {
    room: Arc<Inner>,
    /// `None` once it was let in.
    ticket: Option<u64>,
}

impl WaitingRoom {
    /// A place at the end of the queue.
    ///
    /// # Errors
    /// [`Shed`](ErrorKind::Shed) with [`Retry::After`] when all places are taken; the message says
    /// how many wait.
    pub fn enter(&self) -> Result<WaitingTicket> {
        let now = self.0.shared.clock.precise();
        let mut room = self.0.room.lock();
        let ticket = match room.come(now) {
            Came::In => None,
            Came::Waits(ticket) => Some(ticket),
            Came::Full(waiting) => {
                let wait = room.estimate(waiting, now);
                drop(room);
                let text = format!("the waiting room is full: {waiting} wait, {wait:?} long");
                return Err(
                    Error::not_applied(ErrorKind::Shed, text).with_retry(Retry::After(wait))
                );
            }
        };
        drop(room);
        if ticket.is_some() {
            Keeper::start(&self.0);
        }
        Ok(WaitingTicket { room: self.0.clone(), ticket })
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.room.lock().waiting()
    }
}

impl WaitingTicket {
    /// How many wait before this one.
    #[must_use]
    pub fn position(&self) -> usize {
        let room = self.room.room.lock();
        self.ticket.and_then(|ticket| room.position(ticket)).unwrap_or(0)
    }

    /// How long it will be, at least; less when somebody leaves.
    #[must_use]
    pub fn estimate(&self) -> Duration {
        let now = self.room.shared.clock.precise();
        let room = self.room.room.lock();
        let position = self.ticket.and_then(|ticket| room.position(ticket));
        position.map_or(Duration::ZERO, |before| room.estimate(before, now))
    }

    /// Waits until it is let in.
    ///
    /// # Cancel safety
    /// A dropped wait keeps the place for as long as the ticket is kept.
    pub fn admitted(&mut self) -> impl Future<Output = ()> + Send + '_ {
        Admitted(self)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(ticket) = self.ticket else { return Poll::Ready(()) };
        // Cloned and dropped outside the lock: a waker is the caller's own code.
        let waker = cx.waker().clone();
        let (let_in, unused) = self.room.room.lock().poll(ticket, waker);
        drop(unused);
        if let_in {
            self.ticket = None;
            return Poll::Ready(());
        }
        Keeper::start(&self.room);
        Poll::Pending
    }
}

struct Admitted<'a>(&'a mut WaitingTicket);

impl Future for Admitted<'_> {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.poll(cx)
    }
}

impl Drop for WaitingTicket {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            let waker = self.room.room.lock().leave(ticket);
            drop(waker);
        }
    }
}

impl fmt::Debug for WaitingRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitingRoom").field("waiting", &self.waiting()).finish()
    }
}

impl fmt::Debug for WaitingTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitingTicket").field("position", &self.position()).finish()
    }
}
