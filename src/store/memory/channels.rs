//! Publish and subscribe inside one process.

use crate::key::Key;
use crate::runtime::BoxFuture;
use crate::store::{Delivery, Subscription};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

/// Messages that wait for a slow subscriber; then they are dropped for a gap.
const WAITING_MAX: usize = 1024;

#[derive(Default)]
pub(super) struct Channels {
    by_name: Mutex<BTreeMap<Key, Vec<Weak<Mutex<Mailbox>>>>>,
}

#[derive(Default)]
struct Mailbox {
    waiting: VecDeque<Delivery>,
    waker: Option<Waker>,
}

impl Mailbox {
    fn push(&mut self, delivery: Delivery) -> Option<Waker> {
        if self.waiting.len() >= WAITING_MAX {
            self.waiting.clear();
            self.waiting.push_back(Delivery::Gap);
        }
        self.waiting.push_back(delivery);
        self.waker.take()
    }
}

impl Channels {
    pub(super) fn subscribe(&self, channel: &Key) -> Box<dyn Subscription> {
        let mailbox = Arc::new(Mutex::new(Mailbox::default()));
        let mut by_name = self.by_name.lock();
        by_name.retain(|_, list| {
            list.retain(|m| m.strong_count() > 0);
            !list.is_empty()
        });
        by_name.entry(channel.clone()).or_default().push(Arc::downgrade(&mailbox));
        Box::new(Listener(mailbox))
    }

    pub(super) fn publish(&self, channel: &Key, message: &Bytes) {
        let list = self.by_name.lock().get(channel).cloned().unwrap_or_default();
        deliver(&list, &Delivery::Message(message.clone()));
    }

    /// Tells every subscriber that messages may have been lost, as a reconnect does.
    pub(super) fn gap(&self) {
        let all: Vec<_> = self.by_name.lock().values().flatten().cloned().collect();
        deliver(&all, &Delivery::Gap);
    }
}

/// Wakes outside of all locks.
fn deliver(list: &[Weak<Mutex<Mailbox>>], delivery: &Delivery) {
    for mailbox in list.iter().filter_map(Weak::upgrade) {
        let waker = mailbox.lock().push(delivery.clone());
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

struct Listener(Arc<Mutex<Mailbox>>);

impl Subscription for Listener {
    fn next(&mut self) -> BoxFuture<'_, Option<Delivery>> {
        Box::pin(std::future::poll_fn(|cx| {
            let mut mailbox = self.0.lock();
            match mailbox.waiting.pop_front() {
                Some(delivery) => Poll::Ready(Some(delivery)),
                None => {
                    mailbox.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        }))
    }
}

impl fmt::Debug for Channels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Channels({})", self.by_name.lock().len())
    }
}
