//! One node: its connection, made again with back-off; a cap on what is in flight; a breaker.

use super::answer;
use super::router::Addr;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Retry};
use crate::runtime::{Clock, Home, wall_seed};
use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, Pipeline, ProtocolVersion,
    PushInfo, PushKind, RedisError, RedisResult, Value,
};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

const BACK_OFF_FIRST: Duration = Duration::from_millis(25);
const BACK_OFF_MAX: Duration = Duration::from_secs(1);
/// Calls in a row that ran into the time limit, after which the breaker opens; and stays open
/// until a new connection is answered on.
const TIMEOUTS_MAX: u32 = 8;
/// Threads whose spare handles are kept apart; more share.
const STRIPES: usize = 8;
const SPARE_MAX: usize = 64;
/// Connections that one call waits for, each of which was lost at once.
const OPENINGS_MAX: u32 = 3;

/// What all nodes of a store share.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) response: Duration,
    pub(super) connect: Duration,
    pub(super) in_flight_max: usize,
}

/// How the nodes of a store are reached.
#[derive(Clone, Debug)]
pub(super) struct Reach {
    pub(super) base: ConnectionInfo,
    pub(super) limits: Limits,
    pub(super) home: Home,
    pub(super) clock: Clock,
}

impl Reach {
    /// How one node of the store is connected to. Redirects name hosts; user, password, database
    /// and TLS are those of the first seed.
    pub(super) fn info(&self, addr: &Addr) -> ConnectionInfo {
        let host = addr.host.to_string();
        let to = match self.base.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => ConnectionAddr::TcpTls {
                host,
                port: addr.port,
                insecure: *insecure,
                tls_params: tls_params.clone(),
            },
            ConnectionAddr::Unix(path) => ConnectionAddr::Unix(path.clone()),
            _ => ConnectionAddr::Tcp(host, addr.port),
        };
        let settings = self.base.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        self.base.clone().set_addr(to).set_redis_settings(settings)
    }
}

/// Why a command has no reply.
#[derive(Clone, Debug)]
pub(super) enum Failed {
    /// Nothing was sent, and soon it may be: the connection is being made again.
    Unsent(Error),
    /// Nothing was sent, and waiting is no use: full, the breaker is open, the login is refused.
    Refused(Error),
    /// It was sent, and what became of it is not known.
    Lost(RedisError),
}

pub(super) struct Node {
    pub(super) addr: Addr,
    pub(super) replica: bool,
    /// `None` for a connection of the user's own, which is never made again.
    reach: Option<Reach>,
    in_flight_max: usize,
    live: ArcSwapOption<Live>,
    door: Mutex<Door>,
    opened: Notify,
    /// Calls in flight, and those that kept handles have room for.
    in_flight: Arc<Apart<AtomicUsize>>,
    spare: [Apart<Mutex<Vec<Handle>>>; STRIPES],
    waiting: Arc<Apart<AtomicUsize>>,
    timeouts: AtomicU32,
    used: AtomicBool,
    /// The estimate of [`hedge`](super::hedge), in nanoseconds.
    pub(super) slow_ns: AtomicU64,
}

struct Live {
    conn: MultiplexedConnection,
    /// Set when the connection has ended while nobody was waiting for a reply, and when no call may
    /// begin on it any more.
    ended: Arc<AtomicBool>,
}

impl Live {
    fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// Room for one call in flight, and a handle to the connection for it. Making one touches counters
/// that all threads share, so those that a call is done with are kept, apart for each thread.
struct Handle {
    live: Arc<Live>,
    conn: MultiplexedConnection,
    _permit: Permit,
}

/// On cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Apart<T>(T);

/// A node with a reference for each stripe of threads, so that no two count on one line.
pub(super) struct Spread {
    pub(super) node: Arc<Node>,
    own: [Arc<Apart<Arc<Node>>>; STRIPES],
}

/// This thread's own reference to a node.
pub(super) struct Ours(Arc<Apart<Arc<Node>>>);

impl Spread {
    pub(super) fn new(node: Arc<Node>) -> Spread {
        Spread { own: std::array::from_fn(|_| Arc::new(Apart(node.clone()))), node }
    }

    pub(super) fn ours(&self) -> Ours {
        Ours(self.own[stripe()].clone())
    }
}

impl Deref for Ours {
    type Target = Arc<Node>;
    fn deref(&self) -> &Arc<Node> {
        &self.0.0
    }
}

/// The stripe of this thread.
fn stripe() -> usize {
    thread_local!(static STRIPE: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES
    });
    STRIPE.with(|stripe| *stripe)
}

/// What stands between a call and a connection.
#[derive(Default)]
struct Door {
    opening: bool,
    fails: u32,
    shut_until: Tick,
    /// The breaker shut it: the node is there and does not answer.
    breaker: bool,
    last: Option<Error>,
}

enum Knock {
    Come(Arc<Live>),
    Wait,
    Open,
}

impl Node {
    /// A node that is connected when first needed.
    pub(super) fn new(addr: Addr, replica: bool, reach: Reach) -> Arc<Node> {
        let in_flight_max = reach.limits.in_flight_max;
        Node::build(addr, replica, Some(reach), in_flight_max, None)
    }

    /// A node over the user's own connection, which is never made again.
    pub(super) fn wrap(conn: MultiplexedConnection, in_flight_max: usize) -> Arc<Node> {
        Node::build(Addr::new("wrapped", 0), false, None, in_flight_max, Some(conn))
    }

    fn build(
        addr: Addr,
        replica: bool,
        reach: Option<Reach>,
        in_flight_max: usize,
        conn: Option<MultiplexedConnection>,
    ) -> Arc<Node> {
        let live = conn.map(|conn| Arc::new(Live { conn, ended: Arc::default() }));
        Arc::new(Node {
            addr,
            replica,
            reach,
            in_flight_max,
            live: ArcSwapOption::new(live),
            door: Mutex::default(),
            opened: Notify::new(),
            in_flight: Arc::default(),
            spare: Default::default(),
            waiting: Arc::default(),
            timeouts: AtomicU32::new(0),
            used: AtomicBool::new(true),
            slow_ns: AtomicU64::new(super::hedge::FIRST_NS),
        })
    }

    /// True when the last calls were answered.
    pub(super) fn answers(&self) -> bool {
        self.timeouts.load(Ordering::Relaxed) == 0 && self.door.lock().fails == 0
    }

    /// Whether it was used since this was last asked.
    pub(super) fn was_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }

    /// Sends one command; its reply, which may be an error reply.
    ///
    /// # Cancel safety
    /// Dropped, the command may have been sent or not; its reply reaches nobody.
    pub(super) async fn one(self: &Arc<Node>, cmd: &Cmd) -> Result<Value, Failed> {
        let mut handle = self.enter().await?;
        let reply = handle.conn.send_packed_command(cmd).await;
        self.leave(handle, reply)
    }

    /// Sends commands that stand together on the wire; a reply for each.
    ///
    /// # Cancel safety
    /// As [`one`](Node::one).
    pub(super) async fn many(self: &Arc<Node>, pipe: &Pipeline) -> Result<Vec<Value>, Failed> {
        let mut handle = self.enter().await?;
        let replies = handle.conn.send_packed_commands(pipe, 0, pipe.len()).await;
        self.leave(handle, replies)
    }

    /// Like [`many`](Node::many) for commands that were sent elsewhere before, each after ASKING
    /// if `asking`.
    pub(super) async fn again(
        self: &Arc<Node>,
        cmds: &[&Cmd],
        asking: bool,
    ) -> Result<Vec<Value>, Failed> {
        let mut pipe = Pipeline::with_capacity(cmds.len() * 2);
        for cmd in cmds {
            if asking {
                pipe.cmd("ASKING");
            }
            pipe.add_command((*cmd).clone());
        }
        let replies = self.many(&pipe).await?;
        if !asking {
            return Ok(replies);
        }
        Ok(replies.into_iter().skip(1).step_by(2).collect())
    }

    async fn enter(self: &Arc<Node>) -> Result<Handle, Failed> {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        let kept = self.spare().lock().pop();
        if let Some(kept) = kept
            && !kept.live.is_ended()
        {
            return Ok(kept);
        }
        let permit = self.permit().ok_or_else(|| {
            let full = Error::not_applied(ErrorKind::Shed, "too many calls in flight to the node");
            Failed::Refused(full.with_retry(Retry::After(Duration::from_millis(10))))
        })?;
        let live = match self.live.load_full() {
            Some(live) if !live.is_ended() => live,
            _ => self.connection().await?,
        };
        let conn = live.conn.clone();
        Ok(Handle { live, conn, _permit: permit })
    }

    /// Room for one more call; if need be that of a handle which is kept.
    fn permit(&self) -> Option<Permit> {
        // Another call may take the place that a kept handle gives up: then the next one.
        loop {
            if let Some(permit) = Permit::take(&self.in_flight, self.in_flight_max) {
                return Some(permit);
            }
            let kept = self.spare.iter().find_map(|spare| spare.0.lock().pop());
            drop(kept?);
        }
    }

    fn spare(&self) -> &Mutex<Vec<Handle>> {
        &self.spare[stripe()].0
    }

    fn leave<T>(&self, handle: Handle, reply: RedisResult<T>) -> Result<T, Failed> {
        match reply {
            Ok(reply) => {
                if self.timeouts.load(Ordering::Relaxed) != 0 {
                    self.timeouts.store(0, Ordering::Relaxed);
                }
                self.keep(handle);
                Ok(reply)
            }
            Err(e) => {
                self.failed(&handle.live, &e);
                Err(Failed::Lost(e))
            }
        }
    }

    /// Keeps a handle for the next call of this thread.
    fn keep(&self, handle: Handle) {
        let mut spare = self.spare().lock();
        // Looked at under the lock: who retires a connection empties this after saying so.
        let useful = spare.len() < SPARE_MAX && !handle.live.is_ended();
        if useful {
            return spare.push(handle);
        }
        drop(spare);
        drop(handle);
    }

    /// Stops using the present connection; calls in flight on it go on.
    fn retire(&self) {
        if let Some(old) = self.live.swap(None) {
            old.ended.store(true, Ordering::Release);
        }
        for spare in &self.spare {
            let old = std::mem::take(&mut *spare.0.lock());
            drop(old);
        }
    }

    /// The connection, made now if there is none. One task makes it for all who wait, so that
    /// callers who give up early never keep it from being made.
    async fn connection(self: &Arc<Node>) -> Result<Arc<Live>, Failed> {
        for _ in 0..OPENINGS_MAX {
            let mut opened = std::pin::pin!(self.opened.notified());
            opened.as_mut().enable();
            match self.knock()? {
                Knock::Come(live) => return Ok(live),
                Knock::Open => self.open(),
                Knock::Wait => {}
            }
            opened.await;
        }
        match self.knock()? {
            Knock::Come(live) => Ok(live),
            _ => Err(Failed::Unsent(self.ended())),
        }
    }

    fn ended(&self) -> Error {
        Error::not_applied(ErrorKind::Store, "the connection to the node is lost")
            .with_retry(if self.reach.is_none() { Retry::Never } else { Retry::Now })
    }

    fn knock(&self) -> Result<Knock, Failed> {
        let mut door = self.door.lock();
        if let Some(live) = self.live.load_full() {
            if !live.is_ended() {
                return Ok(Knock::Come(live));
            }
            self.retire();
        }
        let Some(reach) = &self.reach else { return Err(Failed::Refused(self.ended())) };
        if door.opening {
            return Ok(Knock::Wait);
        }
        let wait = door.shut_until.since(reach.clock.now());
        if wait.is_zero() {
            door.opening = true;
            return Ok(Knock::Open);
        }
        let last = door.last.clone().unwrap_or_else(|| self.ended());
        if last.kind() == ErrorKind::Config {
            return Err(Failed::Refused(last));
        }
        let last = last.with_retry(Retry::After(wait));
        Err(if door.breaker { Failed::Refused(last) } else { Failed::Unsent(last) })
    }

    /// Starts the task that makes the connection.
    fn open(self: &Arc<Node>) {
        let Some(reach) = &self.reach else { return };
        let opening = Opening(self.clone());
        reach.home.spawn(Box::pin(async move {
            let node = &opening.0;
            let made = node.connect().await;
            let mut door = node.door.lock();
            match made {
                Ok(live) => {
                    (door.fails, door.breaker, door.last) = (0, false, None);
                    node.live.store(Some(Arc::new(live)));
                }
                Err((e, timeout)) => {
                    door.last = Some(e);
                    door.breaker = timeout;
                    node.shut(&mut door);
                }
            }
            drop(door);
        }));
    }

    /// A new connection; or why there is none, and whether that is for want of an answer.
    async fn connect(&self) -> Result<Live, (Error, bool)> {
        let Some(reach) = &self.reach else { return Err((self.ended(), false)) };
        let ended = Arc::new(AtomicBool::new(false));
        let flag = ended.clone();
        // The callback must not block; it sets a flag.
        let on_push = move |info: PushInfo| -> Result<(), std::convert::Infallible> {
            if info.kind == PushKind::Disconnection {
                flag.store(true, Ordering::Release);
            }
            Ok(())
        };
        let error = |e: RedisError| {
            let timeout = e.is_timeout();
            (answer::not_connected(e, &self.addr), timeout)
        };
        let conn = open(reach, &self.addr, on_push).await.map_err(error)?;
        if self.replica {
            let read_only = conn.clone().send_packed_command(&redis::cmd("READONLY")).await;
            read_only.and_then(Value::extract_error).map_err(error)?;
        }
        Ok(Live { conn, ended })
    }

    /// Gives up a connection that failed, or that has not answered in time: what comes late over
    /// it is nobody's. Calls in flight on it go on.
    fn failed(&self, live: &Arc<Live>, e: &RedisError) {
        let timeouts = match e.is_timeout() {
            true => self.timeouts.fetch_add(1, Ordering::Relaxed) + 1,
            false => 0,
        };
        if self.reach.is_none() {
            return;
        }
        let mut door = self.door.lock();
        // The failure of an old connection does not close the new one.
        if self.live.load().as_ref().is_none_or(|now| !Arc::ptr_eq(now, live)) {
            return;
        }
        self.retire();
        if timeouts >= TIMEOUTS_MAX {
            door.last = Some(Error::not_applied(
                ErrorKind::Throttled,
                "the node has stopped answering; its breaker is open",
            ));
            door.breaker = true;
            self.shut(&mut door);
        }
    }

    /// Forgets the connection, so that the next call makes a new one: the name may by now belong
    /// to another server. At most four times a second.
    pub(super) fn reconnect(&self) {
        let Some(reach) = &self.reach else { return };
        let mut door = self.door.lock();
        if reach.clock.now().since(door.shut_until) > BACK_OFF_MAX / 4 {
            self.retire();
            self.shut(&mut door);
        }
    }

    /// A place among the calls that wait before they are sent again.
    pub(super) fn wait(&self) -> Option<Permit> {
        Permit::take(&self.waiting, self.in_flight_max)
    }

    fn shut(&self, door: &mut Door) {
        let full = (BACK_OFF_FIRST * 2u32.pow(door.fails.min(6))).min(BACK_OFF_MAX);
        // Between half and all of it: the callers of many processes must not come back together.
        let jitter = u32::try_from(wall_seed() % 512).unwrap_or(0);
        door.fails += 1;
        if let Some(reach) = &self.reach {
            door.shut_until = reach.clock.now().after(full / 2 + full / 1024 * jitter);
        }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Node({}:{})", self.addr.host, self.addr.port)
    }
}

/// Opens a connection to a node. Call it at home: there it will live.
pub(super) async fn open<T: Send + 'static>(
    reach: &Reach,
    addr: &Addr,
    on_push: impl Fn(PushInfo) -> Result<(), T> + Send + Sync + 'static,
) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(reach.limits.connect))
        .set_response_timeout(Some(reach.limits.response))
        .set_push_sender(on_push);
    let client = Client::open(reach.info(addr))?;
    client.get_multiplexed_async_connection_with_config(&config).await
}

/// The task that makes a connection; however it ends, those who wait hear of it.
struct Opening(Arc<Node>);

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.door.lock().opening = false;
        self.0.opened.notify_waiters();
    }
}

/// A place among a node's calls, given back when it is dropped.
pub(super) struct Permit(Arc<Apart<AtomicUsize>>);

impl Permit {
    fn take(count: &Arc<Apart<AtomicUsize>>, max: usize) -> Option<Permit> {
        if count.0.fetch_add(1, Ordering::Relaxed) >= max {
            count.0.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Permit(count.clone()))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
