//! Subscriptions: one connection each, made again when it fails, with a gap told.

use super::answer;
use super::node::{self, Reach};
use super::route::Route;
use super::router::Addr;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::runtime::BoxFuture;
use crate::store::{Delivery, Subscription};
use bytes::Bytes;
use parking_lot::Mutex;
use redis::{PushInfo, PushKind, Value};
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::task::AbortHandle;

/// Messages that wait for a slow subscriber; then they are dropped for a gap.
const WAITING_MAX: usize = 1024;
/// How often a silent connection is asked whether it lives.
const PING_EVERY: Duration = Duration::from_secs(1);
const BACK_OFF_FIRST: Duration = Duration::from_millis(25);
const BACK_OFF_MAX: Duration = Duration::from_secs(1);
/// Nodes that send a subscriber on to each other before it has failed.
const REDIRECTS_MAX: u32 = 16;

#[derive(Default)]
struct Mailbox {
    waiting: VecDeque<Delivery>,
    waker: Option<Waker>,
}

type Shared = Arc<Mutex<Mailbox>>;

/// Wakes outside of the lock.
fn push(mailbox: &Mutex<Mailbox>, delivery: Delivery) {
    let mut inside = mailbox.lock();
    if inside.waiting.len() >= WAITING_MAX {
        inside.waiting.clear();
        inside.waiting.push_back(Delivery::Gap);
    }
    let again = delivery == Delivery::Gap && inside.waiting.back() == Some(&Delivery::Gap);
    if !again {
        inside.waiting.push_back(delivery);
    }
    let waker = inside.waker.take();
    drop(inside);
    if let Some(waker) = waker {
        waker.wake();
    }
}

struct Listener {
    mailbox: Shared,
    task: AbortHandle,
}

impl Subscription for Listener {
    fn next(&mut self) -> BoxFuture<'_, Option<Delivery>> {
        Box::pin(std::future::poll_fn(|cx| {
            let mut mailbox = self.mailbox.lock();
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

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Subscribes; once this returns, every message is delivered or a gap is.
///
/// # Cancel safety
/// Dropping the future ends the subscription.
pub(super) async fn subscribe(route: &Arc<Route>, channel: &Key) -> Result<Box<dyn Subscription>> {
    let Some(reach) = route.reach().cloned() else { return Err(Error::unsupported("publish")) };
    let mailbox = Shared::default();
    let (ready, first) = oneshot::channel();
    let run = run(route.clone(), reach, channel.clone(), mailbox.clone(), ready);
    // Held from here on, so that a caller who gives up ends the task.
    let listener = Listener { mailbox, task: route.home().spawn(Box::pin(run)) };
    match first.await {
        Ok(Ok(())) => Ok(Box::new(listener)),
        Ok(Err(e)) => Err(e),
        Err(_) => Err(lost()),
    }
}

fn lost() -> Error {
    Error::not_applied(ErrorKind::Store, "the subscription's connection was lost")
}

async fn run(
    route: Arc<Route>,
    reach: Reach,
    channel: Key,
    mailbox: Shared,
    ready: oneshot::Sender<Result<()>>,
) {
    let mut ready = Some(ready);
    let mut wait = BACK_OFF_FIRST;
    loop {
        let lost = Arc::new(Notify::new());
        match open(&route, &reach, &channel, &mailbox, &lost).await {
            Ok(mut conn) => {
                match ready.take() {
                    Some(ready) => drop(ready.send(Ok(()))),
                    // What was published since the loss was published to nobody.
                    None => push(&mailbox, Delivery::Gap),
                }
                wait = BACK_OFF_FIRST;
                let ping = redis::cmd("PING");
                while tokio::time::timeout(PING_EVERY, lost.notified()).await.is_err() {
                    if conn.send_packed_command(&ping).await.is_err() {
                        break;
                    }
                }
                push(&mailbox, Delivery::Gap);
            }
            Err(e) => {
                if let Some(ready) = ready.take() {
                    drop(ready.send(Err(e)));
                    return;
                }
            }
        }
        route.sleep(wait).await;
        wait = (wait * 2).min(BACK_OFF_MAX);
    }
}

/// A connection that is subscribed.
async fn open(
    route: &Arc<Route>,
    reach: &Reach,
    channel: &Key,
    mailbox: &Shared,
    lost: &Arc<Notify>,
) -> Result<redis::aio::MultiplexedConnection> {
    let name = if route.is_cluster() { "SSUBSCRIBE" } else { "SUBSCRIBE" };
    let mut cmd = redis::cmd(name);
    cmd.arg(channel.as_bytes());
    let mut node = route.owner(channel.cluster_slot());
    for _ in 0..REDIRECTS_MAX {
        let mut conn = connect(reach, &node.addr, mailbox, lost).await?;
        match conn.send_packed_command(&cmd).await {
            Ok(reply @ Value::ServerError(_)) => {
                let answer = route.heard(&node, &reply);
                if answer == super::router::Answer::Final {
                    return Err(refused(&reply));
                }
                route.sleep(BACK_OFF_FIRST).await;
                node = route.owner(channel.cluster_slot());
            }
            Ok(_) => return Ok(conn),
            Err(e) => return Err(answer::lost(e, false)),
        }
    }
    Err(lost_slot())
}

fn refused(reply: &Value) -> Error {
    match reply {
        Value::ServerError(e) if answer::scripts_refused(reply) => {
            Error::unsupported("publish").with_source(redis::RedisError::from(e.clone()))
        }
        Value::ServerError(e) => answer::refused(e),
        _ => answer::unexpected(false),
    }
}

fn lost_slot() -> Error {
    Error::not_applied(ErrorKind::Store, "no node takes the subscription")
}

async fn connect(
    reach: &Reach,
    addr: &Addr,
    mailbox: &Shared,
    lost: &Arc<Notify>,
) -> Result<redis::aio::MultiplexedConnection> {
    let (mailbox, lost) = (mailbox.clone(), lost.clone());
    let on_push = move |info: PushInfo| -> Result<(), std::convert::Infallible> {
        match info.kind {
            PushKind::Message | PushKind::SMessage => {
                if let Some(Value::BulkString(bytes)) = info.data.into_iter().nth(1) {
                    push(&mailbox, Delivery::Message(Bytes::from(bytes)));
                }
            }
            // A node ends the subscriptions of a slot that it gives away.
            PushKind::Disconnection | PushKind::SUnsubscribe | PushKind::Unsubscribe => {
                lost.notify_one();
            }
            _ => {}
        }
        Ok(())
    };
    node::open(reach, addr, on_push).await.map_err(|e| answer::not_connected(e, addr))
}
