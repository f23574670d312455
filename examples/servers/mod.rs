//! Real `redis-server` processes on free loopback ports.
//!
//! Each server has a keeper: a shell that started it and waits on a pipe from this process. When
//! the guard is dropped, or this process ends in whatever way, the pipe closes and the keeper
//! kills its server by process id and removes its folder.
//!
//! Shared by the tests, the bench and `viral_post --redis cluster`.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    missing_docs,
    missing_debug_implementations,
    reason = "each user has its part; real processes and clocks; a failure is a panic"
)]
#![allow(clippy::allow_attributes, reason = "an expectation would fail where all is used")]

pub mod cluster;

use redis::{Cmd, ConnectionLike, FromRedisValue, Value};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// It outlives an interrupt from the terminal, which reaches the whole group, and cleans up.
const KEEPER: &str = r#"trap '' INT HUP TERM; dir="$1"; shift
"$@" >"$dir/log" 2>&1 </dev/null &
server=$!
echo "$server"
read -r word
kill -CONT "$server"; kill -KILL "$server"; wait "$server"
[ "$word" = keep ] || rm -rf "$dir""#;

/// One server. Dropping it kills it.
pub struct Server {
    pub port: u16,
    pub bus: u16,
    pid: u32,
    keeper: Child,
    dir: PathBuf,
    args: Vec<String>,
}

/// So many ports that nobody listens on.
pub fn free_ports(n: usize) -> Vec<u16> {
    let held: Vec<_> = (0..n).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    held.iter().map(|l| l.local_addr().unwrap().port()).collect()
}

fn folder() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("heatsink-redis-{}-{n}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

fn spawn(dir: &PathBuf, port: u16, args: &[String]) -> (Child, u32) {
    let mut command = Command::new("sh");
    command.args(["-c", KEEPER, "sh"]).arg(dir).args(["redis-server", "--port"]);
    command.arg(port.to_string()).args(["--bind", "127.0.0.1", "--save", "", "--appendonly"]);
    command.args(["no", "--enable-debug-command", "yes", "--repl-diskless-sync-delay", "0"]);
    command.arg("--dir").arg(dir).args(args);
    let mut keeper = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell");
    let mut pid = String::new();
    BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut pid).unwrap();
    (keeper, pid.trim().parse().unwrap())
}

impl Server {
    /// A server with further arguments, once it answers.
    pub fn start(args: &[&str]) -> Server {
        let ports = free_ports(2);
        Server::at(ports[0], ports[1], args)
    }

    pub fn at(port: u16, bus: u16, args: &[&str]) -> Server {
        let present = Command::new("redis-server").arg("--version").output().is_ok();
        assert!(present, "redis-server is missing; install it with: apt-get install redis-server");
        let (dir, args) = (folder(), args.iter().map(|a| (*a).to_string()).collect::<Vec<_>>());
        let (keeper, pid) = spawn(&dir, port, &args);
        let server = Server { port, bus, pid, keeper, dir, args };
        server.wait_up();
        server
    }

    fn wait_up(&self) {
        let limit = Instant::now() + Duration::from_secs(10);
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let log = || std::fs::read_to_string(self.dir.join("log")).unwrap_or_default();
            assert!(Instant::now() < limit, "the server does not start:\n{}", log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the server and starts it again at its port and in its folder, with further
    /// arguments. Returns once it takes connections.
    pub fn restart(&mut self, args: &[&str]) {
        drop(self.keeper.stdin.as_mut().unwrap().write_all(b"keep\n"));
        self.end();
        let args: Vec<String> =
            self.args.iter().cloned().chain(args.iter().map(|a| (*a).to_string())).collect();
        (self.keeper, self.pid) = spawn(&self.dir, self.port, &args);
        self.wait_up();
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Its folder, which goes with it.
    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    fn signal(&self, signal: &str) {
        let kill = Command::new("kill").args([signal, &self.pid.to_string()]).status().unwrap();
        assert!(kill.success());
    }

    pub fn kill(&self) {
        self.signal("-KILL");
    }

    pub fn pause(&self) {
        self.signal("-STOP");
    }

    pub fn resume(&self) {
        self.signal("-CONT");
    }

    pub fn control(&self) -> Control {
        let client = redis::Client::open(self.url()).unwrap();
        Control(client.get_connection_with_timeout(Duration::from_secs(5)).unwrap())
    }

    fn end(&mut self) {
        drop(self.keeper.stdin.take());
        drop(self.keeper.wait());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// A connection past the store, for setting things up and looking inside.
pub struct Control(redis::Connection);

impl Control {
    /// Sends a command of words.
    pub fn ask<T: FromRedisValue>(&mut self, words: &str) -> T {
        self.words(&words.split(' ').collect::<Vec<_>>())
    }

    pub fn words<T: FromRedisValue>(&mut self, words: &[&str]) -> T {
        let reply = self.raw(words).unwrap_or_else(|e| panic!("{words:?}: {e}"));
        redis::from_redis_value(reply).unwrap()
    }

    pub fn raw(&mut self, words: &[&str]) -> redis::RedisResult<Value> {
        let mut cmd = Cmd::new();
        cmd.arg(words);
        self.0.req_command(&cmd)
    }

    /// Moves one key to the server at `port`.
    pub fn migrate(&mut self, port: u16, key: &[u8]) {
        let mut cmd = redis::cmd("MIGRATE");
        cmd.arg("127.0.0.1").arg(port).arg(key).arg(0).arg(1000);
        self.0.req_command(&cmd).unwrap();
    }
}

/// The tests measure stalls on a machine of few cores: one at a time.
pub fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Runs an async test on a runtime of its own, while no other runs.
pub fn run<T>(test: impl Future<Output = T>) -> T {
    let _alone = alone();
    runtime().block_on(test)
}

/// A runtime of two workers.
pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}
