//! Many commands at once: those of one node in one message, each with redirects of its own.

use super::super::node::Node;
use super::super::router::{Addr, Attempt, Step};
use super::{Replies, Route, crowded, judge, strange};
use crate::error::Result;
use crate::runtime::BoxFuture;
use redis::{Cmd, Value};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Units that stand together in one message to a node.
const TOGETHER_MAX: usize = 128;

/// Commands for one slot that are sent and answered together.
pub(in super::super) struct Units {
    /// The slot of each unit.
    pub(in super::super) slots: Vec<u16>,
    /// The commands of all units, `each` for every one.
    pub(in super::super) cmds: Vec<Cmd>,
    pub(in super::super) each: usize,
    pub(in super::super) write: bool,
}

impl Units {
    fn of(&self, unit: usize) -> &[Cmd] {
        &self.cmds[unit * self.each..(unit + 1) * self.each]
    }
}

/// One unit on its way.
struct Pending {
    unit: usize,
    attempt: Attempt,
    /// Where the last answer sent it; `None` for the owner of its slot.
    hop: Option<(Addr, bool)>,
}

impl Route {
    /// Sends many units, those of one node together; each has its own replies and redirects.
    ///
    /// # Cancel safety
    /// As [`one`](Route::one), for each of them.
    pub(in super::super) async fn batch(
        self: &Arc<Self>,
        units: &Units,
    ) -> Vec<Result<Vec<Value>>> {
        let deadline = self.clock.now().after(self.call);
        let mut done: Vec<Option<Result<Vec<Value>>>> = Vec::new();
        done.resize_with(units.slots.len(), || None);
        let attempt = Attempt::new(units.write, deadline);
        let start = |unit| Pending { unit, attempt: attempt.clone(), hop: None };
        let mut pending: Vec<Pending> = (0..units.slots.len()).map(start).collect();
        let mut later: Vec<Pending> = Vec::new();
        let mut pause = Duration::ZERO;
        loop {
            if pending.is_empty() {
                if later.is_empty() {
                    break;
                }
                self.runtime.sleep(std::mem::take(&mut pause)).await;
                pending = std::mem::take(&mut later);
            }
            for (node, mut sent, got) in self.round(units, std::mem::take(&mut pending)).await {
                for (mut one, got) in split(&mut sent, got, units.each) {
                    let answer = self.learn(&node, judge(&got, &node.addr));
                    match one.attempt.next(answer, self.clock.now()) {
                        Step::Deliver => done[one.unit] = Some(self.delivered(got, units.write)),
                        Step::Send { to, asking } => {
                            one.hop = Some((to, asking));
                            pending.push(one);
                        }
                        Step::Wait(_) if node.wait().is_none() => {
                            done[one.unit] = Some(Err(crowded()));
                        }
                        Step::Wait(wait) => {
                            one.hop = None;
                            pause = pause.max(wait);
                            later.push(one);
                        }
                    }
                }
            }
        }
        done.into_iter().map(|d| d.unwrap_or_else(|| Err(strange(units.write)))).collect()
    }

    /// Sends what is pending, grouped by node.
    async fn round(
        &self,
        units: &Units,
        pending: Vec<Pending>,
    ) -> Vec<(Arc<Node>, Vec<Pending>, Replies)> {
        let mut groups: BTreeMap<(Addr, bool), (Arc<Node>, Vec<Pending>)> = BTreeMap::new();
        for one in pending {
            let slot = units.slots[one.unit];
            let asking = one.hop.as_ref().is_some_and(|(_, asking)| *asking);
            let to = one.hop.as_ref().and_then(|(addr, _)| self.node(addr, false));
            let node = to.unwrap_or_else(|| self.owner(slot));
            let group = groups.entry((node.addr.clone(), asking));
            group.or_insert_with(|| (node, Vec::new())).1.push(one);
        }
        let mut sends: Vec<BoxFuture<'_, _>> = Vec::new();
        for ((_, asking), (node, mut members)) in groups {
            while !members.is_empty() {
                let rest = members.split_off(members.len().min(TOGETHER_MAX));
                let (part, node) = (std::mem::replace(&mut members, rest), node.clone());
                sends.push(Box::pin(async move {
                    let cmds: Vec<&Cmd> = part.iter().flat_map(|p| units.of(p.unit)).collect();
                    let got = node.again(&cmds, asking).await;
                    (node, part, got)
                }));
            }
        }
        join(sends).await
    }
}

/// Deals the replies of one message out to its units.
fn split(
    sent: &mut Vec<Pending>,
    got: Replies,
    each: usize,
) -> impl Iterator<Item = (Pending, Replies)> {
    let (mut replies, failed) = match got {
        Ok(replies) => (replies.into_iter(), None),
        Err(failed) => (Vec::new().into_iter(), Some(failed)),
    };
    std::mem::take(sent).into_iter().map(move |one| match &failed {
        Some(failed) => (one, Err(failed.clone())),
        None => (one, Ok(replies.by_ref().take(each).collect())),
    })
}

/// Polls all futures until each is done.
async fn join<T>(mut futures: Vec<BoxFuture<'_, T>>) -> Vec<T> {
    if futures.len() == 1
        && let Some(only) = futures.pop()
    {
        return vec![only.await];
    }
    let mut done: Vec<Option<T>> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        let mut pending = false;
        for (future, done) in futures.iter_mut().zip(&mut done) {
            if done.is_none() {
                match future.as_mut().poll(cx) {
                    Poll::Ready(out) => *done = Some(out),
                    Poll::Pending => pending = true,
                }
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    done.into_iter().flatten().collect()
}
