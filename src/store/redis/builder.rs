//! How a [`RedisStore`] is configured and connected.

use super::answer;
use super::node::{Limits, Node, Reach};
use super::route::{Route, Topology};
use super::router::Addr;
use super::scripts::Scripts;
use super::{Inner, Options, RedisStore};
use crate::error::{Error, Result};
use crate::runtime::{Home, ambient};
use redis::aio::MultiplexedConnection;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, Value};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Options of a [`RedisStore`]. Begins with [`RedisStore::builder`].
#[derive(Clone)]
#[must_use]
pub struct RedisStoreBuilder {
    /// They may hold a password.
    seeds: Vec<String>,
    #[cfg(feature = "redis-tls")]
    root: Option<Vec<u8>>,
    #[cfg(feature = "redis-tls")]
    client: Option<redis::ClientTlsConfig>,
    cluster: bool,
    limits: Limits,
    call: Duration,
    options: Options,
}

impl RedisStoreBuilder {
    pub(super) fn new(url: &str) -> RedisStoreBuilder {
        RedisStoreBuilder {
            seeds: vec![url.into()],
            #[cfg(feature = "redis-tls")]
            root: None,
            #[cfg(feature = "redis-tls")]
            client: None,
            cluster: false,
            limits: Limits {
                response: Duration::from_secs(1),
                connect: Duration::from_secs(1),
                in_flight_max: 1024,
            },
            call: Duration::from_secs(2),
            options: Options {
                scripts: true,
                replicas: false,
                hedge: false,
                ttl: true,
                ids_kept: Duration::from_secs(24 * 3600),
                ids_max: 1 << 20,
                max_in_flight_time: Duration::from_secs(10),
            },
        }
    }

    /// One more node to find the cluster through; it makes this a cluster. User, password and TLS
    /// are those of the first.
    pub fn seed(mut self, url: &str) -> Self {
        self.cluster = true;
        self.seeds.push(url.into());
        self
    }

    /// Whether this is a cluster. Default: no, unless there is more than one seed.
    pub fn cluster(mut self, cluster: bool) -> Self {
        self.cluster = cluster;
        self
    }

    /// The certificate, in PEM, of the authority that signs the servers' certificates. Default:
    /// those that the system trusts. Feature `redis-tls`.
    #[cfg(feature = "redis-tls")]
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.root = Some(pem.into());
        self
    }

    /// The certificate and the key, in PEM, that the client shows. Default: none. Feature
    /// `redis-tls`.
    #[cfg(feature = "redis-tls")]
    pub fn client_certificate(
        mut self,
        certificate: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        let (client_cert, client_key) = (certificate.into(), key.into());
        self.client = Some(redis::ClientTlsConfig { client_cert, client_key });
        self
    }

    /// How long a command that was sent is waited for. Default: 1 s.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.limits.response = timeout;
        self
    }

    /// How long a connection may take to be made. Default: 1 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.limits.connect = timeout;
        self
    }

    /// How long a call may be sent on and wait, for a slot on the move or a node that is away,
    /// before it fails as not applied. A command once sent is waited for by
    /// [`response_timeout`](Self::response_timeout) on top of it. Default: 2 s.
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call = timeout;
        self
    }

    /// Calls in flight to one node, and as many that wait for it; more are refused with
    /// [`Shed`](crate::ErrorKind::Shed), so that a slow node holds its own callers only.
    /// Default: 1,024.
    pub fn in_flight_max(mut self, calls: usize) -> Self {
        self.limits.in_flight_max = calls;
        self
    }

    /// Whether scripts may be used. Connecting finds out when the server refuses them to this
    /// user. Default: yes.
    pub fn scripts(mut self, scripts: bool) -> Self {
        self.options.scripts = scripts;
        self
    }

    /// Whether [`Store::get_replica`](crate::Store::get_replica) reads from the replicas of a
    /// cluster. Default: no.
    ///
    /// # Staleness
    /// As old as the replication is behind: milliseconds as a rule, without limit while a
    /// replica has lost its master and `replica-serve-stale-data` is on. An absent key is asked
    /// for at its master too, since a replica does not follow a slot on the move.
    pub fn replicas(mut self, replicas: bool) -> Self {
        self.options.replicas = replicas;
        self
    }

    /// Whether a read of one key that takes longer than 95 in 100 reads of its master have taken,
    /// or that its master fails, is sent to a replica too. Only in a cluster. At most one in
    /// twenty reads is sent twice for being slow. Default: no.
    ///
    /// # Staleness
    /// Such a read may bring what the replica has. It may be older than a write that this process
    /// has finished: the promise that a caller never sees what its own write has replaced holds
    /// without this option only.
    pub fn hedged_reads(mut self, hedge: bool) -> Self {
        self.options.hedge = hedge;
        self
    }

    /// Whether a read whose value may be cached asks for its expiry too, with a second command in
    /// the same message; a read of a key that is not hot does not. Without it a value near the end of its life may be cached beyond it, by at most
    /// the stale limit. Default: yes.
    pub fn read_ttl(mut self, ttl: bool) -> Self {
        self.options.ttl = ttl;
        self
    }

    /// How long ids of [`add_once`](crate::Store::add_once) and holds of
    /// [`take`](crate::Store::take) are remembered after the last of their key. Default: 24 h.
    pub fn ids_kept(mut self, kept: Duration) -> Self {
        self.options.ids_kept = kept;
        self
    }

    /// How many ids or holds one key remembers. Default: 1,048,576.
    pub fn ids_max(mut self, ids: usize) -> Self {
        self.options.ids_max = ids;
        self
    }

    /// How long after it was sent a write of unknown outcome may still be applied. A server that
    /// was paused for longer applies later what it had received. Default: 10 s.
    pub fn max_in_flight_time(mut self, time: Duration) -> Self {
        self.options.max_in_flight_time = time;
        self
    }

    /// Connects: finds the nodes of a cluster, and what the server refuses to this user.
    ///
    /// # Cost
    /// One connection and three commands; a connection to every node when it is first needed.
    ///
    /// # Cancel safety
    /// Dropping the future drops the connections.
    ///
    /// # Errors
    /// [`Config`](crate::ErrorKind::Config) for a URL that is none, a login that is refused, and
    /// options that the server cannot carry; [`Store`](crate::ErrorKind::Store) when no node can
    /// be reached.
    pub async fn connect(self) -> Result<RedisStore> {
        let infos = self.seeds.iter().map(|url| parse(url)).collect::<Result<Vec<_>>>()?;
        let addrs = infos.iter().map(|i| addr(i, self.cluster)).collect::<Result<Vec<_>>>()?;
        let (Some(base), Some(first)) = (infos.first(), addrs.first()) else {
            return Err(Error::config("no node to connect to"));
        };
        self.check(base)?;
        let runtime = ambient();
        let reach = Reach {
            base: self.with_certificates(base)?,
            limits: self.limits.clone(),
            home: home()?,
            clock: runtime.clock(),
        };
        let first = first.clone();
        let topology = if self.cluster { Topology::Cluster(addrs) } else { Topology::One };
        let route = Route::new(topology, reach, first, runtime, self.call);
        let mut options = self.options.clone();
        let greeting = route.clone();
        let (cluster, scripts) = (self.cluster, options.scripts);
        options.scripts = route
            .home()
            .clone()
            .inside(async move { greet(&greeting, cluster, scripts).await })
            .await?;
        Ok(RedisStore::over(Inner { route, scripts: Scripts::new(), options, wrapped: false }))
    }

    /// A store over the connection of [`RedisStore::wrap`].
    pub(super) fn wrap(self, mut conn: MultiplexedConnection) -> Result<RedisStore> {
        conn.set_response_timeout(self.limits.response);
        let node = Node::wrap(conn, self.limits.in_flight_max);
        let route = Route::wrap(node, home()?, ambient(), self.call);
        let options = self.options;
        Ok(RedisStore::over(Inner { route, scripts: Scripts::new(), options, wrapped: true }))
    }

    #[cfg(feature = "redis-tls")]
    fn with_certificates(&self, base: &ConnectionInfo) -> Result<ConnectionInfo> {
        let (client_tls, root_cert) = (self.client.clone(), self.root.clone());
        if client_tls.is_none() && root_cert.is_none() {
            return Ok(base.clone());
        }
        if !matches!(base.addr(), ConnectionAddr::TcpTls { .. }) {
            return Err(Error::config("a certificate needs TLS: a URL that begins with rediss://"));
        }
        // A file without a certificate is none that trusts nobody.
        let pem = |bytes: &[u8]| bytes.windows(27).any(|w| w == b"-----BEGIN CERTIFICATE-----");
        let client_pem = client_tls.as_ref().map(|client| &client.client_cert);
        if !root_cert.iter().chain(client_pem).all(|bytes| pem(bytes)) {
            return Err(Error::config("a certificate is not in PEM"));
        }
        let certificates = redis::TlsCertificates { client_tls, root_cert };
        let error = |e| Error::config("a certificate or a key cannot be read").with_source(e);
        let client = redis::Client::build_with_tls(base.clone(), certificates).map_err(error)?;
        Ok(client.get_connection_info().clone())
    }

    #[cfg(not(feature = "redis-tls"))]
    #[expect(clippy::unnecessary_wraps, reason = "as with certificates")]
    fn with_certificates(&self, base: &ConnectionInfo) -> Result<ConnectionInfo> {
        Ok(base.clone())
    }

    fn check(&self, base: &ConnectionInfo) -> Result<()> {
        if self.cluster && base.redis_settings().db() != 0 {
            return Err(Error::config("a Redis cluster has no databases but number 0"));
        }
        for (asked, name) in
            [(self.options.replicas, "replicas"), (self.options.hedge, "hedged_reads")]
        {
            if asked && !self.cluster {
                let what = format!("`{name}` needs a cluster, which names its replicas");
                return Err(Error::config(what));
            }
        }
        if self.limits.in_flight_max == 0 {
            return Err(Error::config("`in_flight_max` is 0: no call could be made"));
        }
        Ok(())
    }
}

impl fmt::Debug for RedisStoreBuilder {
    /// Without URLs and keys: they hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStoreBuilder")
            .field("cluster", &self.cluster)
            .field("limits", &self.limits)
            .field("call", &self.call)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

fn home() -> Result<Home> {
    let error = |e| Error::config("no thread for the connections could be started").with_source(e);
    Home::here().map_err(error)
}

fn parse(url: &str) -> Result<ConnectionInfo> {
    // The URL may hold a password: it is not repeated.
    let error = |e| Error::config("the URL of a Redis node is not one").with_source(e);
    url.into_connection_info().map_err(error)
}

fn addr(info: &ConnectionInfo, cluster: bool) -> Result<Addr> {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Ok(Addr::new(host, *port))
        }
        _ if cluster => Err(Error::config("a cluster is not reached through a Unix socket")),
        _ => Ok(Addr::new("unix", 0)),
    }
}

/// The first words with the server; whether scripts may be used.
async fn greet(route: &Arc<Route>, cluster: bool, scripts: bool) -> Result<bool> {
    if cluster {
        route.refresh().await?;
    } else {
        let mut info = redis::cmd("INFO");
        let reply = route.one(0, info.arg("cluster"), false).await?;
        // A user who may not ask is taken at their word.
        let text = match &reply {
            Value::BulkString(bytes) => String::from_utf8_lossy(bytes),
            Value::VerbatimString { text, .. } => text.into(),
            _ => "".into(),
        };
        if text.contains("cluster_enabled:1") {
            return Err(Error::config(
                "the node belongs to a cluster; use RedisStore::cluster or builder.cluster(true)",
            ));
        }
    }
    if !scripts {
        return Ok(false);
    }
    let mut probe = redis::cmd("EVAL");
    let reply = route.one(0, probe.arg("return 1").arg(0), false).await?;
    Ok(!answer::scripts_refused(&reply))
}
