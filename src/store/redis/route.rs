//! Sends commands to the nodes that serve them, and follows what they answer.

mod batch;

pub(super) use batch::Units;

use super::answer;
use super::hedge;
use super::node::{Failed, Node, Ours, Reach, Spread};
use super::router::{Addr, Answer, Attempt, Pace, Range, Step, Table};
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::runtime::{Clock, Home, Runtime, wall_seed};
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use redis::{Cmd, Pipeline, Value};
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

/// Nodes that are asked for the table before it is given up for now.
const ASKED_MAX: usize = 16;

/// Where the nodes come from.
#[derive(Clone, Debug)]
pub(super) enum Topology {
    /// One node, or the user's own connection.
    One,
    /// A cluster, found through these.
    Cluster(Vec<Addr>),
}

/// What a store sends its commands through.
pub(super) struct Route {
    topology: Topology,
    view: ArcSwap<View>,
    /// Held by who changes the view; the nodes by address, replicas apart from masters.
    pool: Mutex<BTreeMap<(Addr, bool), Arc<Node>>>,
    reach: Option<Reach>,
    home: Home,
    runtime: Arc<dyn Runtime>,
    clock: Clock,
    call: Duration,
    pace: Mutex<Pace>,
    refreshing: AtomicBool,
    turn: AtomicUsize,
    /// Hedges that may be sent, in parts of one.
    budget: AtomicU32,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    moved: AtomicU64,
    asked: AtomicU64,
    waited: AtomicU64,
    lost: AtomicU64,
    refreshed: AtomicU64,
    failovers: AtomicU64,
    hedged: AtomicU64,
}

/// What a [`RedisStore`](super::RedisStore) has met on its way, in numbers since it was made.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RedisStats {
    /// Commands that were sent on because their slot had moved.
    pub moved: u64,
    /// Commands that were sent on because their slot was on the move.
    pub asked: u64,
    /// Waits for a node that did not execute a command for now, or could not be reached.
    pub waited: u64,
    /// Commands that were sent and not answered.
    pub lost: u64,
    /// How often the table of a cluster was asked for.
    pub refreshed: u64,
    /// Replicas that took over from their master. Replication is asynchronous: writes that the
    /// old master acknowledged last may be missing after each of them.
    pub failovers: u64,
    /// Reads that were sent to a replica too, because their master was slow or failed.
    pub hedged: u64,
}

/// The table, with the nodes that it names.
struct View {
    table: Table,
    masters: Vec<Spread>,
    replicas: Vec<Vec<Arc<Node>>>,
}

type Replies = Result<Vec<Value>, Failed>;

impl Route {
    /// A route to the nodes of `topology`.
    pub(super) fn new(
        topology: Topology,
        reach: Reach,
        first: Addr,
        runtime: Arc<dyn Runtime>,
        call: Duration,
    ) -> Arc<Route> {
        let node = Node::new(first, false, reach.clone());
        let home = reach.home.clone();
        Route::build(topology, node, Some(reach), home, runtime, call)
    }

    /// A route to the one node behind the user's own connection.
    pub(super) fn wrap(
        node: Arc<Node>,
        home: Home,
        runtime: Arc<dyn Runtime>,
        call: Duration,
    ) -> Arc<Route> {
        Route::build(Topology::One, node, None, home, runtime, call)
    }

    fn build(
        topology: Topology,
        node: Arc<Node>,
        reach: Option<Reach>,
        home: Home,
        runtime: Arc<dyn Runtime>,
        call: Duration,
    ) -> Arc<Route> {
        let clock = runtime.clock();
        let table = Table::single(node.addr.clone());
        let view =
            View { table, masters: vec![Spread::new(node.clone())], replicas: vec![Vec::new()] };
        Arc::new(Route {
            topology,
            view: ArcSwap::from_pointee(view),
            pool: Mutex::new(BTreeMap::from([((node.addr.clone(), false), node)])),
            reach,
            home,
            runtime,
            clock,
            call,
            pace: Mutex::new(Pace::new()),
            refreshing: AtomicBool::new(false),
            turn: AtomicUsize::new(0),
            budget: AtomicU32::new(0),
            counts: Counts::default(),
        })
    }

    pub(super) fn home(&self) -> &Home {
        &self.home
    }

    pub(super) fn reach(&self) -> Option<&Reach> {
        self.reach.as_ref()
    }

    pub(super) fn stats(&self) -> RedisStats {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let c = &self.counts;
        RedisStats {
            moved: of(&c.moved),
            asked: of(&c.asked),
            waited: of(&c.waited),
            lost: of(&c.lost),
            refreshed: of(&c.refreshed),
            failovers: of(&c.failovers),
            hedged: of(&c.hedged),
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.topology, Topology::Cluster(_))
    }

    pub(super) async fn sleep(&self, wait: Duration) {
        self.runtime.sleep(wait).await;
    }

    /// The number of the shard that owns a slot.
    pub(super) fn shard(&self, slot: u16) -> Option<u32> {
        self.view.load().table.owner(slot).and_then(|n| u32::try_from(n).ok())
    }

    /// The node that owns a slot. A slot that nobody is known to own is asked for anywhere: the
    /// answer tells more than no answer.
    pub(super) fn owner(&self, slot: u16) -> Arc<Node> {
        self.ours(slot).clone()
    }

    /// The same, by this thread's own reference.
    fn ours(&self, slot: u16) -> Ours {
        let view = self.view.load();
        let number = view
            .table
            .owner(slot)
            .unwrap_or_else(|| self.turn.fetch_add(1, Ordering::Relaxed) % view.masters.len());
        view.masters[number].ours()
    }

    /// A replica of a slot that answers, if one does. They take turns.
    fn replica(self: &Arc<Self>, slot: u16) -> Option<Arc<Node>> {
        let view = self.view.load();
        let all = &view.replicas[view.table.owner(slot)?];
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut in_turn = (0..all.len()).map(|i| &all[(turn + i) % all.len()]);
        let found = in_turn.find(|node| node.answers()).cloned();
        if found.is_none() || self.pace.lock().is_old(self.clock.now()) {
            self.doubt();
        }
        found
    }

    /// Sends one command to the owner of `slot` and follows redirects until it has a reply, which
    /// may be an error reply.
    ///
    /// # Cancel safety
    /// Dropped, a write may have been applied or not. Nothing is sent after that.
    pub(super) async fn one(self: &Arc<Self>, slot: u16, cmd: &Cmd, write: bool) -> Result<Value> {
        let deadline = self.clock.now().after(self.call);
        let node = self.ours(slot);
        match node.one(cmd).await {
            Ok(reply) if !matches!(reply, Value::ServerError(_)) => Ok(reply),
            got => {
                let (node, got) = (node.clone(), got.map(|reply| vec![reply]));
                let replies =
                    Box::pin(self.follow(slot, &[cmd], write, deadline, node, got)).await?;
                replies.into_iter().next().ok_or_else(|| answer::unexpected(write))
            }
        }
    }

    /// Like [`one`](Route::one) for commands that only read and are sent together.
    pub(super) async fn read(self: &Arc<Self>, slot: u16, pipe: &Pipeline) -> Result<Vec<Value>> {
        let deadline = self.clock.now().after(self.call);
        let node = self.ours(slot);
        match node.many(pipe).await {
            Ok(replies) if !replies.iter().any(|r| matches!(r, Value::ServerError(_))) => {
                Ok(replies)
            }
            got => {
                let node = node.clone();
                let cmds: Vec<&Cmd> = pipe.cmd_iter().collect();
                Box::pin(self.follow(slot, &cmds, false, deadline, node, got)).await
            }
        }
    }

    async fn follow(
        self: &Arc<Self>,
        slot: u16,
        cmds: &[&Cmd],
        write: bool,
        deadline: Tick,
        mut node: Arc<Node>,
        mut got: Replies,
    ) -> Result<Vec<Value>> {
        let mut attempt = Attempt::new(write, deadline);
        loop {
            let answer = self.learn(&node, judge(&got, &node.addr));
            match attempt.next(answer, self.clock.now()) {
                Step::Deliver => return self.delivered(got, write),
                Step::Send { to, asking } => {
                    node = self.node(&to, false).ok_or_else(|| strange(write))?;
                    got = node.again(cmds, asking).await;
                }
                Step::Wait(wait) => {
                    let Some(place) = node.wait() else { return Err(crowded()) };
                    self.runtime.sleep(wait).await;
                    drop(place);
                    node = self.owner(slot);
                    got = node.again(cmds, false).await;
                }
            }
        }
    }

    /// What the caller gets in the end.
    fn delivered(&self, got: Replies, write: bool) -> Result<Vec<Value>> {
        match got {
            Ok(replies) => Ok(replies),
            Err(Failed::Unsent(e) | Failed::Refused(e)) => Err(e),
            Err(Failed::Lost(e)) => Err(answer::lost(e, write)),
        }
    }

    /// Reads from a replica of a slot, if one answers. No redirects are followed.
    pub(super) async fn read_replica(
        self: &Arc<Self>,
        slot: u16,
        pipe: &Pipeline,
    ) -> Option<Vec<Value>> {
        let node = self.replica(slot)?;
        let got = node.many(pipe).await;
        self.learn(&node, judge(&got, &node.addr));
        got.ok()
    }

    /// Like [`read`](Route::read); when the owner is slow for its own measure, or fails, a replica
    /// is asked too, and the first value counts.
    pub(super) async fn read_hedged(
        self: &Arc<Self>,
        slot: u16,
        pipe: &Pipeline,
    ) -> Result<Vec<Value>> {
        let node = self.owner(slot);
        let start = self.clock.precise();
        let earn = |budget| Some(hedge::earned(budget));
        let _ = self.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, earn);
        let mut first = pin!(self.read(slot, pipe));
        let delay = hedge::delay(node.slow_ns.load(Ordering::Relaxed));
        let soon = either(first.as_mut(), self.runtime.sleep(delay)).await;
        let took = self.clock.precise().since(start);
        let estimate = hedge::estimated(node.slow_ns.load(Ordering::Relaxed), took);
        node.slow_ns.store(estimate, Ordering::Relaxed);
        match soon {
            Ok(Ok(replies)) => return Ok(replies),
            Ok(Err(e)) => {
                count(&self.counts.hedged);
                return self.value_of_replica(slot, pipe).await.ok_or(e);
            }
            Err(()) => {}
        }
        let spend = self.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, hedge::spent);
        if spend.is_err() {
            return first.await;
        }
        count(&self.counts.hedged);
        let second = Box::pin(self.value_of_replica(slot, pipe));
        match either(first.as_mut(), second).await {
            Ok(Ok(replies)) | Err(Some(replies)) => Ok(replies),
            Ok(Err(e)) => self.value_of_replica(slot, pipe).await.ok_or(e),
            Err(None) => first.await,
        }
    }

    /// A value from a replica. That it has none proves nothing: the key may be on the move.
    async fn value_of_replica(self: &Arc<Self>, slot: u16, pipe: &Pipeline) -> Option<Vec<Value>> {
        let found = |replies: &Vec<Value>| matches!(replies.first(), Some(Value::BulkString(_)));
        self.read_replica(slot, pipe).await.filter(found)
    }

    /// What a reply that came another way than through here says.
    pub(super) fn heard(self: &Arc<Self>, node: &Arc<Node>, reply: &Value) -> Answer {
        self.learn(node, answer::answer(reply, &node.addr))
    }

    /// Takes from an answer what it says about the table.
    fn learn(self: &Arc<Self>, node: &Arc<Node>, answer: Answer) -> Answer {
        match &answer {
            Answer::Final => return answer,
            Answer::Moved { .. } => count(&self.counts.moved),
            Answer::Ask { .. } => count(&self.counts.asked),
            Answer::NotNow | Answer::ReadOnly | Answer::Unsent => count(&self.counts.waited),
            Answer::Lost => count(&self.counts.lost),
        }
        if !self.is_cluster() {
            if answer == Answer::ReadOnly {
                node.reconnect();
            }
            let elsewhere = matches!(answer, Answer::Moved { .. } | Answer::Ask { .. });
            return if elsewhere { Answer::Final } else { answer };
        }
        match &answer {
            Answer::Final | Answer::Ask { .. } => {}
            Answer::Moved { slot, to } => {
                self.moved(*slot, to);
                self.doubt();
            }
            Answer::NotNow | Answer::ReadOnly | Answer::Unsent | Answer::Lost => self.doubt(),
        }
        answer
    }

    fn moved(&self, slot: u16, to: &Addr) {
        if self.view.load().table.serves(slot, to) {
            return;
        }
        let mut pool = self.pool.lock();
        let mut table = self.view.load().table.clone();
        if table.moved(slot, to) {
            self.show(&mut pool, table);
        }
    }

    fn show(&self, pool: &mut BTreeMap<(Addr, bool), Arc<Node>>, table: Table) {
        let Some(reach) = &self.reach else { return };
        let mut node = |addr: &Addr, replica| {
            let new = || Node::new(addr.clone(), replica, reach.clone());
            pool.entry((addr.clone(), replica)).or_insert_with(new).clone()
        };
        let masters = table.shards().iter().map(|s| Spread::new(node(&s.master, false))).collect();
        let replicas = |s: &super::router::Shard| -> Vec<Arc<Node>> {
            s.replicas.iter().map(|addr| node(addr, true)).collect()
        };
        let replicas = table.shards().iter().map(replicas).collect();
        self.view.store(Arc::new(View { table, masters, replicas }));
    }

    /// The node at an address, in the table or not: a slot may move to one that has none yet.
    fn node(&self, addr: &Addr, replica: bool) -> Option<Arc<Node>> {
        let reach = self.reach.as_ref()?;
        let mut pool = self.pool.lock();
        let new = || Node::new(addr.clone(), replica, reach.clone());
        Some(pool.entry((addr.clone(), replica)).or_insert_with(new).clone())
    }

    /// Has the table asked for in the background. No call waits for it.
    fn doubt(self: &Arc<Self>) {
        if self.refreshing.swap(true, Ordering::AcqRel) {
            return;
        }
        let refresh = Refresh(self.clone());
        self.home.spawn(Box::pin(async move {
            let route = &refresh.0;
            let wait = route.pace.lock().ask(route.clock.now(), wall_seed());
            route.runtime.sleep(wait).await;
            drop(route.refresh().await);
        }));
    }

    /// Asks the nodes in turn for the table until one answers.
    ///
    /// # Errors
    /// What the last node said.
    pub(super) async fn refresh(&self) -> Result<()> {
        let mut cmd = redis::cmd("CLUSTER");
        cmd.arg("SLOTS");
        let mut last = Error::not_applied(ErrorKind::Store, "no node of the cluster is known");
        for node in self.candidates() {
            match node.one(&cmd).await {
                Ok(Value::ServerError(e)) => last = answer::refused(&e),
                Ok(reply) => match answer::slots(&reply, &node.addr) {
                    Some(ranges) if !ranges.is_empty() => {
                        self.apply(&ranges);
                        return Ok(());
                    }
                    _ => last = Error::not_applied(ErrorKind::Store, "a node knows no slots"),
                },
                Err(Failed::Unsent(e) | Failed::Refused(e)) => last = e,
                Err(Failed::Lost(e)) => last = answer::lost(e, false),
            }
        }
        Err(last)
    }

    /// Who is asked for the table: masters that answer, in turn, then the others, then the seeds.
    fn candidates(&self) -> Vec<Arc<Node>> {
        let view = self.view.load();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let n = view.masters.len();
        let mut all: Vec<_> = (0..n).map(|i| view.masters[(turn + i) % n].node.clone()).collect();
        all.extend(view.replicas.iter().flatten().filter_map(|r| self.node(&r.addr, false)));
        if let Topology::Cluster(seeds) = &self.topology {
            all.extend(seeds.iter().filter_map(|seed| self.node(seed, false)));
        }
        all.sort_by_key(|node| !node.answers());
        all.truncate(ASKED_MAX);
        all
    }

    fn apply(&self, ranges: &[Range]) {
        let mut pool = self.pool.lock();
        let old = self.view.load_full();
        let table = old.table.refreshed(ranges);
        count(&self.counts.refreshed);
        self.counts.failovers.fetch_add(old.table.failovers(&table), Ordering::Relaxed);
        if !table.has_hole() {
            self.pace.lock().settled();
        }
        self.show(&mut pool, table);
        // Nodes that left the table and that no redirect has named since the last time are closed.
        let view = self.view.load();
        let named = |node: &Arc<Node>| {
            let masters = view.masters.iter().map(|master| &master.node);
            let all = masters.chain(view.replicas.iter().flatten());
            all.into_iter().any(|n| Arc::ptr_eq(n, node))
        };
        pool.retain(|_, node| named(node) || node.was_used());
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// However the task that asks for the table ends, the next doubt starts another.
struct Refresh(Arc<Route>);

impl Drop for Refresh {
    fn drop(&mut self) {
        self.0.refreshing.store(false, Ordering::Release);
    }
}

/// The answer of a unit: the first of its replies that is not final.
fn judge(got: &Replies, from: &Addr) -> Answer {
    match got {
        Ok(replies) => {
            let answers = replies.iter().map(|reply| answer::answer(reply, from));
            answers.into_iter().find(|a| *a != Answer::Final).unwrap_or(Answer::Final)
        }
        Err(Failed::Unsent(_)) => Answer::Unsent,
        Err(Failed::Refused(_)) => Answer::Final,
        Err(Failed::Lost(_)) => Answer::Lost,
    }
}

fn strange(write: bool) -> Error {
    answer::unexpected(write)
}

fn crowded() -> Error {
    Error::not_applied(ErrorKind::Shed, "too many calls wait for the node")
        .with_retry(Retry::After(Duration::from_millis(10)))
}

/// The output of whichever is done first; the first one's if both are.
async fn either<A, B>(
    mut first: Pin<&mut impl Future<Output = A>>,
    mut second: impl Future<Output = B> + Unpin,
) -> std::result::Result<A, B> {
    std::future::poll_fn(|cx| match first.as_mut().poll(cx) {
        Poll::Ready(out) => Poll::Ready(Ok(out)),
        Poll::Pending => Pin::new(&mut second).poll(cx).map(Err),
    })
    .await
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Route").field("topology", &self.topology).finish_non_exhaustive()
    }
}
