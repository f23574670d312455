//! Redis and Valkey: one node, or a cluster that is resharded and fails over while it is used.
//!
//! The store routes by itself over multiplexed connections to single nodes. A command is sent to
//! the node that owns its slot. What the node answers decides the rest:
//!
//! | answer | what follows |
//! |---|---|
//! | `MOVED` | sent to the new owner at once; the table is asked for in the background |
//! | `ASK` | sent there once, with `ASKING` before it in the same message |
//! | `TRYAGAIN`, `CLUSTERDOWN`, `LOADING`, `READONLY` | sent again after 5 to 40 ms, up to the call's limit |
//! | any other error | the caller's, not applied |
//! | no connection | as for `TRYAGAIN`; nothing was sent |
//! | sent, and then no answer | a write: `Unknown`, never sent again. A read: sent again |
//!
//! So an add is counted once or its error says that nobody knows, while slots move, nodes fail and
//! connections break. What the servers themselves lose is lost: replication is asynchronous, and a
//! write that was acknowledged may be missing after a failover.
//!
//! Needs Redis 6 or Valkey (the protocol is RESP3), and Redis 7 for publishing in a cluster.

mod answer;
mod builder;
mod hedge;
mod node;
mod reply;
mod route;
mod router;
mod scripts;
mod subscribe;

pub use builder::RedisStoreBuilder;
pub use route::RedisStats;

use super::{
    Capability, End, Ended, Holds, Id, Once, Popped, Store, Stored, Subscription, Take, Version,
};
use crate::error::{Error, ErrorKind, Result};
use crate::key::{self, Key};
use bytes::Bytes;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, Value};
use reply::{bare, checked, int, list, once, text, total, units, value, yes};
use route::{Route, Units};
use scripts::{Script, Scripts};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// Holds asked for at once.
const HOLDS_PAGE: usize = 512;

/// A TTL beyond ten thousand years is none that a server takes.
const TTL_MS_MAX: u128 = 315_360_000_000_000;

/// A store in Redis or Valkey. Clones are handles to the same connections.
///
/// Values are plain strings under the user's own keys, with their TTLs: what other programs wrote
/// there is read, and what is put here they read. Two forms are heatsink's own: a value that
/// [`put_if_newer`](Store::put_if_newer) or [`claim_lane`](Store::claim_lane) wrote begins with
/// `\x01hsv:` and its version, and a sealed counter ends with `\x01hs-seal:` and its tag. Ids and
/// holds stand in a hash beside their key, in its slot: `{tag}\x01hs:once`, `{tag}\x01hs:hold`.
///
/// Reads, puts, deletes and adds are plain commands. Compare-and-set of a present value,
/// `put_if_newer`, `claim_lane`, `seal`, `add_once` and `take` are scripts; where the server
/// refuses scripts to this user, [`capability`](Store::capability) does not name them.
///
/// While a slot moves key by key, a script over two keys (`add_once`, `take`) is refused by the
/// servers until both exist on one side; the call waits, up to its limit. Atomic moves (Valkey 9,
/// Redis 8.4) have no such time.
///
/// # Cancel safety
/// A dropped call reaches nobody else's reply. A dropped write may have been applied.
///
/// # Example
/// ```no_run
/// use heatsink::{Heatsink, store::RedisStore};
/// # async fn example() -> heatsink::Result<()> {
/// let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
/// let hs = Heatsink::new(store)?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RedisStore {
    inner: Arc<Inner>,
}

struct Inner {
    route: Arc<Route>,
    scripts: Scripts,
    options: Options,
    wrapped: bool,
}

#[derive(Clone, Debug)]
struct Options {
    scripts: bool,
    replicas: bool,
    hedge: bool,
    ttl: bool,
    ids_kept: Duration,
    ids_max: usize,
    max_in_flight_time: Duration,
}

impl RedisStore {
    /// Connects to one node: `redis://user:password@host:port/database`, `rediss://` for TLS
    /// (feature `redis-tls`), `unix://path`.
    ///
    /// # Cost, Cancel safety, Errors
    /// As [`RedisStoreBuilder::connect`].
    pub async fn connect(url: &str) -> Result<RedisStore> {
        RedisStore::builder(url).connect().await
    }

    /// Connects to a cluster through any of its nodes.
    ///
    /// # Cost, Cancel safety, Errors
    /// As [`RedisStoreBuilder::connect`].
    ///
    /// # Example
    /// ```no_run
    /// # use heatsink::store::RedisStore;
    /// # async fn example() -> heatsink::Result<()> {
    /// let store = RedisStore::cluster(&["redis://redis-a:6379", "redis://redis-b:6379"]).await?;
    /// # Ok(()) }
    /// ```
    pub async fn cluster(seeds: &[&str]) -> Result<RedisStore> {
        let Some((first, rest)) = seeds.split_first() else {
            return Err(Error::config("a cluster needs a seed node"));
        };
        let builder = RedisStore::builder(first).cluster(true);
        rest.iter().fold(builder, |builder, url| builder.seed(url)).connect().await
    }

    /// A store with other options.
    pub fn builder(url: &str) -> RedisStoreBuilder {
        RedisStoreBuilder::new(url)
    }

    /// A store over the user's own connection to one node.
    ///
    /// Its limits: the connection is not made again when it is lost, from when on every call
    /// fails; it has no subscriptions and no replicas; a cluster's redirects are errors. Its
    /// database and protocol are as the user chose; its response timeout becomes 1 s here.
    ///
    /// # Errors
    /// [`Config`](ErrorKind::Config) outside of tokio when no thread can be started.
    pub fn wrap(conn: MultiplexedConnection) -> Result<RedisStore> {
        RedisStoreBuilder::new("").wrap(conn)
    }

    /// What the store has met on its way: redirects, waits, failovers.
    #[must_use]
    pub fn stats(&self) -> RedisStats {
        self.inner.route.stats()
    }

    fn over(inner: Inner) -> RedisStore {
        RedisStore { inner: Arc::new(inner) }
    }

    /// Runs a call where its timers and sockets can be reached.
    async fn run<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        self.inner.route.home().inside(call).await
    }

    /// The slot of a key. On one node there are none, and hashing it would be for nothing.
    fn slot(&self, key: &Key) -> u16 {
        if self.inner.route.is_cluster() { key.cluster_slot() } else { 0 }
    }

    /// A plain command on one key.
    async fn plain(&self, key: &Key, cmd: &Cmd, write: bool) -> Result<Value> {
        let reply = self.run(self.inner.route.one(self.slot(key), cmd, write)).await;
        reply.and_then(checked).map_err(|e| e.with_key(key))
    }

    /// Fails where scripts are not allowed, for what goes without them only in part.
    fn scripted(&self, what: &'static str) -> Result<()> {
        if self.inner.options.scripts { Ok(()) } else { Err(Error::unsupported(what)) }
    }

    async fn script(
        &self,
        what: &'static str,
        script: &Script,
        key: &Key,
        keys: &[&[u8]],
        args: &[&[u8]],
    ) -> Result<Value> {
        self.scripted(what)?;
        let slot = self.slot(key);
        let route = &self.inner.route;
        let reply = self.run(async {
            let reply = route.one(slot, &script.cmd(true, keys, args), true).await?;
            if !answer::no_script(&reply) {
                return Ok(reply);
            }
            route.one(slot, &script.cmd(false, keys, args), true).await
        });
        let reply = reply.await.map_err(|e| e.with_key(key))?;
        if answer::scripts_refused(&reply) {
            return Err(Error::unsupported(what));
        }
        match checked(reply) {
            Err(e) if e.kind() == ErrorKind::WrongType => Err(self.why_no_number(key, e).await),
            reply => reply.map_err(|e| e.with_key(key)),
        }
    }

    /// Tells a sealed counter from a value that is no number: the server's error is the same.
    async fn why_no_number(&self, key: &Key, error: Error) -> Error {
        let mut get = redis::cmd("GET");
        let raw = self.plain(key, get.arg(key.as_bytes()), false).await;
        match raw {
            Ok(Value::BulkString(bytes)) if scripts::sealed(&bytes) => {
                Error::not_applied(ErrorKind::Sealed, "the counter is sealed").with_key(key)
            }
            _ => error.with_key(key),
        }
    }

    /// The commands that read one key, and if so its expiry.
    fn read_cmds(&self, key: &Key, ttl: bool) -> Pipeline {
        let mut pipe = Pipeline::with_capacity(2);
        let mut cmd = |name: &str| {
            let mut cmd = Cmd::with_capacity(2, name.len() + key.len());
            cmd.arg(name).arg(key.as_bytes());
            pipe.add_command(cmd);
        };
        cmd("GET");
        if ttl {
            cmd("PTTL");
        }
        pipe
    }

    async fn read(&self, key: &Key, ttl: bool) -> Result<Option<Stored>> {
        let (inner, slot) = (&*self.inner, self.slot(key));
        if inner.options.hedge || ttl {
            let cmds = self.read_cmds(key, ttl);
            let replies = if inner.options.hedge {
                self.run(inner.route.read_hedged(slot, &cmds)).await
            } else {
                self.run(inner.route.read(slot, &cmds)).await
            };
            return replies.and_then(value).map_err(|e| e.with_key(key));
        }
        let mut cmd = Cmd::with_capacity(2, 3 + key.len());
        cmd.arg("GET").arg(key.as_bytes());
        let reply = self.run(inner.route.one(slot, &cmd, false)).await;
        reply.and_then(bare).map_err(|e| e.with_key(key))
    }

    async fn read_many(&self, keys: &[Key], ttl: bool) -> Vec<Result<Option<Stored>>> {
        let read = |key: &Key, into: &mut Vec<Cmd>| {
            into.extend(self.read_cmds(key, ttl).cmd_iter().cloned());
        };
        let replies = self.batch(keys, false, if ttl { 2 } else { 1 }, read).await;
        let one = |(key, got): (&Key, Result<Vec<Value>>)| {
            got.and_then(value).map_err(|e| e.with_key(key))
        };
        keys.iter().zip(replies).map(one).collect()
    }

    fn kept(&self) -> (String, String) {
        let options = &self.inner.options;
        (px(options.ids_kept).to_string(), options.ids_max.to_string())
    }

    /// Many commands of one form, each on its key.
    async fn batch(
        &self,
        keys: &[Key],
        write: bool,
        each: usize,
        cmds: impl Fn(&Key, &mut Vec<Cmd>),
    ) -> Vec<Result<Vec<Value>>> {
        let mut all = Vec::with_capacity(keys.len() * each);
        keys.iter().for_each(|key| cmds(key, &mut all));
        let slots = keys.iter().map(Key::cluster_slot).collect();
        let units = Units { slots, cmds: all, each, write };
        self.inner.route.home().inside(self.inner.route.batch(&units)).await
    }
}

/// A TTL in the server's milliseconds: never early, never zero.
fn px(ttl: Duration) -> u64 {
    let ms = ttl.as_nanos().div_ceil(1_000_000).clamp(1, TTL_MS_MAX);
    u64::try_from(ms).unwrap_or(u64::MAX)
}

fn px_arg(ttl: Option<Duration>) -> String {
    ttl.map_or_else(String::new, |ttl| px(ttl).to_string())
}

impl Store for RedisStore {
    fn capability(&self) -> Capability {
        let Inner { options, wrapped, route, .. } = &*self.inner;
        Capability {
            compare_and_set: options.scripts,
            put_if_newer: options.scripts,
            claim_lane: options.scripts,
            seal: options.scripts,
            add_once: options.scripts,
            fold: options.scripts,
            take: options.scripts,
            tokens: options.scripts,
            publish: !wrapped,
            replicas: options.replicas,
            shard_of: route.is_cluster(),
            ttl: options.ttl,
            version: false,
            uncached: options.ttl,
        }
    }

    async fn get(&self, key: &Key) -> Result<Option<Stored>> {
        self.read(key, self.inner.options.ttl).await
    }

    async fn get_uncached(&self, key: &Key) -> Result<Option<Stored>> {
        self.read(key, false).await
    }

    async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        self.read_many(keys, self.inner.options.ttl).await
    }

    async fn get_many_uncached(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        self.read_many(keys, false).await
    }

    async fn put(&self, key: &Key, bytes: Bytes, ttl: Option<Duration>) -> Result<()> {
        let mut cmd = Cmd::with_capacity(5, key.len() + bytes.len() + 32);
        cmd.arg("SET").arg(key.as_bytes()).arg(bytes.as_ref());
        if let Some(ttl) = ttl {
            cmd.arg("PX").arg(px(ttl));
        }
        self.plain(key, &cmd, true).await.map(drop)
    }

    async fn delete_many(&self, keys: &[Key]) -> Vec<Result<bool>> {
        let delete = |key: &Key, into: &mut Vec<Cmd>| {
            let mut cmd = redis::cmd("DEL");
            cmd.arg(key.as_bytes());
            into.push(cmd);
        };
        let replies = self.batch(keys, true, 1, delete).await;
        let one = |(key, got): (&Key, Result<Vec<Value>>)| {
            let reply = got.map(|mut replies| replies.pop().unwrap_or(Value::Nil));
            reply.and_then(checked).and_then(|r| yes(&r)).map_err(|e| e.with_key(key))
        };
        keys.iter().zip(replies).map(one).collect()
    }

    async fn add(&self, key: &Key, amount: i64) -> Result<i64> {
        let mut cmd = Cmd::with_capacity(3, key.len() + 32);
        cmd.arg("INCRBY").arg(key.as_bytes()).arg(amount);
        match self.plain(key, &cmd, true).await {
            Ok(reply) => total(&reply).map_err(|e| e.with_key(key)),
            Err(e) if e.kind() == ErrorKind::WrongType => Err(self.why_no_number(key, e).await),
            Err(e) => Err(e),
        }
    }

    async fn compare_and_set(
        &self,
        key: &Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> Result<bool> {
        self.scripted("compare_and_set")?;
        let Some(expected) = expected else {
            let mut cmd = redis::cmd("SET");
            cmd.arg(key.as_bytes()).arg(value.as_ref()).arg("NX");
            if let Some(ttl) = ttl {
                cmd.arg("PX").arg(px(ttl));
            }
            return self.plain(key, &cmd, true).await.map(|reply| reply != Value::Nil);
        };
        let ttl = px_arg(ttl);
        let args: [&[u8]; 3] = [&expected, &value, ttl.as_bytes()];
        let script = &self.inner.scripts.compare_and_set;
        yes(&self.script("compare_and_set", script, key, &[key], &args).await?)
    }

    async fn put_if_newer(
        &self,
        key: &Key,
        version: Version,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> Result<bool> {
        let (version, ttl) = (scripts::version_hex(version), px_arg(ttl));
        let args = [version.as_bytes(), &value, ttl.as_bytes()];
        let script = &self.inner.scripts.put_if_newer;
        yes(&self.script("put_if_newer", script, key, &[key], &args).await?)
    }

    async fn seal(&self, key: &Key, tag: u64) -> Result<i64> {
        let tag = format!("{tag:016x}");
        let script = &self.inner.scripts.seal;
        total(&self.script("seal", script, key, &[key], &[tag.as_bytes()]).await?)
    }

    async fn open(&self, key: &Key, tag: u64) -> Result<bool> {
        let tag = format!("{tag:016x}");
        let script = &self.inner.scripts.open;
        yes(&self.script("seal", script, key, &[key], &[tag.as_bytes()]).await?)
    }

    async fn add_once(&self, key: &Key, id: &Id, amount: i64) -> Result<Once> {
        let (ids, (kept, max)) = (scripts::ids(key, "once", id), self.kept());
        let (amount, turn) = (amount.to_string(), scripts::turn(id));
        let args = [&*id.name, amount.as_bytes(), kept.as_bytes(), max.as_bytes(), turn.as_bytes()];
        let script = &self.inner.scripts.add_once;
        once(&self.script("add_once", script, key, &[key, &ids], &args).await?)
    }

    async fn poison_once(&self, key: &Key, id: &Id) -> Result<Once> {
        let (ids, (kept, max)) = (scripts::ids(key, "once", id), self.kept());
        let turn = scripts::turn(id);
        let args = [&*id.name, kept.as_bytes(), max.as_bytes(), turn.as_bytes()];
        let script = &self.inner.scripts.poison_once;
        once(&self.script("add_once", script, key, &[&ids], &args).await?)
    }

    async fn fold(&self, key: &Key, id: &Key, amount: i64) -> Result<bool> {
        let (marks, amount) = (scripts::beside(key, "fold"), amount.to_string());
        let script = &self.inner.scripts.fold;
        let args = [id.as_bytes(), amount.as_bytes()];
        yes(&self.script("fold", script, key, &[key, &marks], &args).await?)
    }

    async fn folded(&self, key: &Key, id: &Key) -> Result<bool> {
        self.scripted("fold")?;
        let mut cmd = redis::cmd("HEXISTS");
        cmd.arg(scripts::beside(key, "fold")).arg(id.as_bytes());
        let reply = self.plain(key, &cmd, false).await?;
        int(&reply).map(|n| n != 0).ok_or_else(|| answer::unexpected(false))
    }

    async fn unfold(&self, key: &Key, id: &Key) -> Result<bool> {
        self.scripted("fold")?;
        let mut cmd = redis::cmd("HDEL");
        cmd.arg(scripts::beside(key, "fold")).arg(id.as_bytes());
        yes(&self.plain(key, &cmd, true).await?)
    }

    async fn claim_lane(&self, key: &Key) -> Result<Stored> {
        let script = &self.inner.scripts.claim_lane;
        let reply = self.script("claim_lane", script, key, &[key], &[]).await?;
        let [Value::BulkString(version), Value::BulkString(bytes)] = list(&reply) else {
            return Err(answer::unexpected(true).with_key(key));
        };
        let version = scripts::parse_version(version);
        Ok(Stored { version, ..Stored::new(Bytes::copy_from_slice(bytes)) })
    }

    async fn take(&self, key: &Key, amount: u64, hold: &Id) -> Result<Take> {
        let (holds, (kept, max)) = (scripts::ids(key, "hold", hold), self.kept());
        // More than a 64-bit integer holds is never there.
        let amount = i64::try_from(amount).map_or_else(|_| String::new(), |n| n.to_string());
        let (name, turn) = (&*hold.name, scripts::turn(hold));
        let args = [name, amount.as_bytes(), kept.as_bytes(), max.as_bytes(), turn.as_bytes()];
        let script = &self.inner.scripts.take;
        let reply = self.script("take", script, key, &[key, &holds], &args).await?;
        let [taken, count] = list(&reply) else { return Err(answer::unexpected(true)) };
        match taken {
            Value::Int(0) => Ok(Take::Short { left: total(count)? }),
            Value::Int(1) => Ok(Take::Taken { left: total(count)? }),
            Value::Int(2) => Ok(Take::Ended { amount: units(count)? }),
            _ => Err(answer::unexpected(true)),
        }
    }

    async fn end_hold(&self, key: &Key, hold: &Id, end: End) -> Result<Ended> {
        let (holds, (kept, max)) = (scripts::ids(key, "hold", hold), self.kept());
        let letter: &[u8] = if end == End::Sold { b"s" } else { b"b" };
        let turn = scripts::turn(hold);
        let args = [&*hold.name, letter, kept.as_bytes(), max.as_bytes(), turn.as_bytes()];
        let script = &self.inner.scripts.end_hold;
        let reply = self.script("take", script, key, &[key, &holds], &args).await?;
        let [when, amount, how] = list(&reply) else { return Err(answer::unexpected(true)) };
        let amount = units(amount)?;
        let how = text(how).and_then(scripts::end).flatten();
        match (when, how) {
            (Value::Int(0), _) => Ok(Ended::Never),
            (Value::Int(1), _) => Ok(Ended::Now { amount }),
            (Value::Int(2), Some(end)) => Ok(Ended::Before { end, amount }),
            _ => Err(answer::unexpected(true)),
        }
    }

    async fn holds(&self, key: &Key, page: Option<Bytes>) -> Result<Holds> {
        self.scripted("take")?;
        // First those with a name alone, then those with a turn.
        let page = page.unwrap_or_else(|| Bytes::from_static(b"0"));
        let (from, what) = match page.strip_prefix(b"t") {
            Some(cursor) => (cursor, "hold.turn"),
            None => (&*page, "hold"),
        };
        let turns = what == "hold.turn";
        let mut cmd = redis::cmd("HSCAN");
        cmd.arg(scripts::beside(key, what)).arg(from).arg("COUNT").arg(HOLDS_PAGE);
        let reply = self.plain(key, &cmd, false).await?;
        scripts::page(&reply, turns).ok_or_else(|| answer::unexpected(false))
    }

    async fn push_tokens(&self, key: &Key, batch: &Id, tokens: Vec<Bytes>) -> Result<bool> {
        let (ids, (_, max)) = (scripts::ids(key, "once", batch), self.kept());
        let turn = scripts::turn(batch);
        let mut args = vec![&*batch.name, max.as_bytes(), turn.as_bytes()];
        args.extend(tokens.iter().map(Bytes::as_ref));
        let script = &self.inner.scripts.push_tokens;
        yes(&self.script("tokens", script, key, &[key, &ids], &args).await?)
    }

    async fn pop_token(&self, key: &Key, hold: &Id) -> Result<Popped> {
        let (holds, (kept, max)) = (scripts::ids(key, "hold", hold), self.kept());
        let turn = scripts::turn(hold);
        let args = [&*hold.name, kept.as_bytes(), max.as_bytes(), turn.as_bytes()];
        let script = &self.inner.scripts.pop_token;
        let reply = self.script("tokens", script, key, &[key, &holds], &args).await?;
        let [popped, count, Value::BulkString(token)] = list(&reply) else {
            return Err(answer::unexpected(true));
        };
        match popped {
            Value::Int(0) => Ok(Popped::Empty),
            Value::Int(1) => {
                Ok(Popped::Token { token: Bytes::copy_from_slice(token), left: units(count)? })
            }
            Value::Int(2) => Ok(Popped::Ended { held: units(count)? > 0 }),
            _ => Err(answer::unexpected(true)),
        }
    }

    async fn count_tokens(&self, key: &Key) -> Result<u64> {
        self.scripted("tokens")?;
        let mut cmd = redis::cmd("LLEN");
        cmd.arg(key.as_bytes());
        let reply = self.plain(key, &cmd, false).await?;
        total(&reply).map(|n| n.max(0).unsigned_abs())
    }

    async fn publish(&self, channel: &Key, message: Bytes) -> Result<()> {
        if self.inner.wrapped {
            return Err(Error::unsupported("publish"));
        }
        let cluster = self.inner.route.is_cluster();
        let mut cmd = redis::cmd(if cluster { "SPUBLISH" } else { "PUBLISH" });
        cmd.arg(channel.as_bytes()).arg(message.as_ref());
        self.plain(channel, &cmd, true).await.map(drop)
    }

    async fn subscribe(&self, channel: &Key) -> Result<Box<dyn Subscription>> {
        let route = &self.inner.route;
        self.run(subscribe::subscribe(route, channel)).await.map_err(|e| e.with_key(channel))
    }

    async fn get_replica(&self, key: &Key) -> Result<Option<Stored>> {
        if !self.inner.options.replicas {
            return Err(Error::unsupported("replicas"));
        }
        let cmds = self.read_cmds(key, self.inner.options.ttl);
        let route = &self.inner.route;
        let near = self.run(async { Ok(route.read_replica(key.cluster_slot(), &cmds).await) });
        if let Some(replies) = near.await?
            && let Ok(Some(found)) = value(replies)
        {
            return Ok(Some(found));
        }
        // A replica that fails, or that has not heard of the key: it may only be on the move.
        self.get(key).await
    }

    fn shard_of(&self, key: &[u8]) -> Option<u32> {
        let route = &self.inner.route;
        if !route.is_cluster() {
            return None;
        }
        route.shard(key::cluster_slot(key))
    }

    fn max_in_flight_time(&self) -> Duration {
        self.inner.options.max_in_flight_time
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("route", &self.inner.route).finish_non_exhaustive()
    }
}
