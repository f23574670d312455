//! Known lists that are kept elsewhere, in a file or in the store, and taken up again when they
//! change.

use super::known::{self, Line};
use crate::engine::control::operator::{Full, Scheduled};
use crate::error::{Error, ErrorKind, Result};
use crate::heatsink::Heatsink;
use crate::key::Key;
use crate::runtime::spawn_thread;
use crate::shared::Shared;
use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;
use std::fmt;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// The longest text that is read.
const BYTES_MAX: usize = 8 << 20;

/// Between two looks at a file, and at a value in the store.
const FILE_EVERY: Duration = Duration::from_secs(1);
const STORE_EVERY: Duration = Duration::from_secs(10);

/// Where a known list is kept.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum KnownSource {
    /// In this file, of 8 MiB at most. Replace it with a rename: what is half written is read, too.
    File(PathBuf),
    /// Under this key, in the store that the handle wraps.
    Store(Key),
}

/// Plain numbers about a list that is followed.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct KnownStats {
    /// Lists that were taken up.
    pub loaded: u64,
    /// Times that a change was not taken up: what was there could not be read, or was no list.
    pub refused: u64,
    /// Why the last change was not taken up; `None` when it was.
    pub error: Option<String>,
    /// Keys and prefixes that are scheduled by it now.
    pub lines: usize,
}

/// A known list that is followed. Dropping it ends that, and what the list has scheduled.
#[must_use = "dropping it takes the list back"]
pub struct KnownList {
    inner: Arc<Inner>,
    wake: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Inner {
    shared: Weak<Shared>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ended: bool,
    stats: KnownStats,
    ids: Vec<u64>,
    seen: Option<Seen>,
    /// It could not be read the last time: said once, not at each look.
    missed: bool,
}

/// What a change is known by.
#[derive(Clone, PartialEq, Eq)]
enum Seen {
    File { changed: (i64, i64), bytes: u64, inode: u64 },
    Value(bytes::Bytes),
}

impl Heatsink {
    /// Schedules what a known list names (see [`Known`](super::Known)), and again whenever the list
    /// changes, until what is returned is dropped. A new list replaces the old one in one step. One
    /// that cannot be read, or names more than there is room for, changes nothing: the old one
    /// stays, and [`KnownList::stats`] says why. So it does where the file or the value is gone: a
    /// store may have evicted it. An empty one clears the list.
    ///
    /// # Staleness
    /// A changed file is noticed within 1 s by its time, length and inode; a changed value within
    /// 10 s.
    ///
    /// # Cost
    /// For a file, a thread and a look at it every second. For a value in the store, one read every
    /// 10 s.
    ///
    /// # Errors
    /// [`Config`](ErrorKind::Config) when the file cannot be read now, [`Codec`](ErrorKind::Codec)
    /// when it is no list, [`Limit`](ErrorKind::Limit) when it names too much. A list in the store
    /// is read later: look at its stats.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore, feed::KnownSource};
    /// # let file = std::env::temp_dir().join(format!("known-doc-{}", std::process::id()));
    /// # std::fs::write(&file, "{\"key\":\"post:9\"}")?;
    /// let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let launch = hs.follow_known(KnownSource::File(file.clone()))?;
    /// assert_eq!(hs.control().treated(), ["post:9".into()]);
    /// drop(launch);
    /// assert!(hs.control().treated().is_empty());
    /// # std::fs::remove_file(file)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn follow_known(&self, source: KnownSource) -> Result<KnownList> {
        self.follow_known_every(source, FILE_EVERY)
    }

    fn follow_known_every(&self, source: KnownSource, every: Duration) -> Result<KnownList> {
        let (shared, state) = (Arc::downgrade(self.shared()), Mutex::default());
        let inner = Arc::new(Inner { shared, state });
        match source {
            KnownSource::File(path) => {
                inner.look_at(&path)?;
                let (wake, woken) = bounded(0);
                let looks = inner.clone();
                let look = move || {
                    while woken.recv_timeout(every) == Err(RecvTimeoutError::Timeout)
                        && looks.alive()
                    {
                        let _ = looks.look_at(&path);
                    }
                };
                let thread = spawn_thread("heatsink-known", look);
                let failed = |e| Error::config("the thread did not start").with_source(e);
                let thread = Some(thread.map_err(failed)?);
                Ok(KnownList { inner, wake: Some(wake), thread })
            }
            KnownSource::Store(key) => {
                let (looks, runtime) = (inner.clone(), self.shared().runtime.clone());
                let task = async move {
                    while looks.alive() {
                        // Only a weak handle is kept while it waits.
                        let Some(shared) = looks.shared.upgrade() else { return };
                        let got = shared.store.clone().get(key.clone()).await;
                        looks.take_value(&shared, got.map(|stored| stored.map(|s| s.bytes)));
                        let (sleeps, clock) = (shared.runtime.clone(), shared.clock.clone());
                        drop(shared);
                        let due = clock.now().after(STORE_EVERY);
                        while clock.now() < due && looks.alive() {
                            sleeps.sleep(FILE_EVERY).await;
                        }
                    }
                };
                runtime.spawn(Box::pin(task));
                Ok(KnownList { inner, wake: None, thread: None })
            }
        }
    }
}

impl KnownList {
    /// Plain numbers about it.
    #[must_use]
    pub fn stats(&self) -> KnownStats {
        self.inner.state.lock().stats.clone()
    }
}

impl Drop for KnownList {
    fn drop(&mut self) {
        drop(self.wake.take());
        let own = std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(|t| t.thread().id() != own) {
            let _ = thread.join();
        }
        let mut state = self.inner.state.lock();
        state.ended = true;
        let ids = std::mem::take(&mut state.ids);
        drop(state);
        if let Some(shared) = self.inner.shared.upgrade() {
            let _ = shared.replace_known(&ids, Vec::new());
        }
    }
}

impl fmt::Debug for KnownList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KnownList({:?})", self.stats())
    }
}

impl Inner {
    fn alive(&self) -> bool {
        let running = self.shared.upgrade().is_some_and(|shared| !shared.has_ended());
        running && !self.state.lock().ended
    }

    /// Takes the file up if it has changed.
    fn look_at(&self, path: &Path) -> Result<()> {
        let Some(shared) = self.shared.upgrade() else { return Ok(()) };
        let mut state = self.state.lock();
        let failed = |e: std::io::Error| {
            Error::config(format!("{} cannot be read", path.display())).with_source(e)
        };
        let read = match look(path) {
            Ok(seen) if state.seen.as_ref() == Some(&seen) => return Ok(()),
            Ok(seen) => read(path).map(|bytes| (seen, bytes)),
            Err(e) => Err(e),
        };
        let text = match read {
            Ok((seen, bytes)) => {
                (state.seen, state.missed) = (Some(seen), false);
                text(&bytes)
            }
            Err(e) => {
                // The next look tries again, whether or not the file has changed.
                state.seen = None;
                if std::mem::replace(&mut state.missed, true) {
                    return Ok(());
                }
                Err(failed(e))
            }
        };
        state.take(&shared, text)
    }

    fn take_value(&self, shared: &Shared, value: Result<Option<bytes::Bytes>>) {
        let mut state = self.state.lock();
        if state.ended {
            return;
        }
        let text = match value {
            Ok(Some(value)) => {
                let seen = Seen::Value(value.clone());
                if state.seen.as_ref() == Some(&seen) {
                    return;
                }
                (state.seen, state.missed) = (Some(seen), false);
                text(&value)
            }
            // There has been none yet, or it has been said.
            Ok(None) if state.missed || state.stats.loaded == 0 => return,
            Ok(None) => {
                (state.seen, state.missed) = (None, true);
                let text = "the value of a known list is not in the store any more";
                Err(Error::not_applied(ErrorKind::Store, text))
            }
            Err(e) => {
                state.seen = None;
                Err(e)
            }
        };
        let _ = state.take(shared, text);
    }
}

impl State {
    /// The list in place of the last one, or a note of why not.
    fn take(&mut self, shared: &Shared, text: Result<String>) -> Result<()> {
        let now = Duration::from_millis(shared.clock.wall_ms());
        let taken = text.and_then(|text| known::plan(&text, now)).and_then(|lines| {
            let n = lines.iter().map(Line::len).sum();
            shared.replace_known(&self.ids, lines).map(|ids| (ids, n))
        });
        match taken {
            Ok((ids, lines)) => {
                (self.ids, self.stats.lines) = (ids, lines);
                (self.stats.loaded, self.stats.error) = (self.stats.loaded + 1, None);
                Ok(())
            }
            Err(e) => {
                self.stats.refused += 1;
                self.stats.error = Some(e.to_string());
                #[cfg(feature = "tracing")]
                tracing::warn!(target: "heatsink", why = %e, "a known list was not taken up");
                Err(e)
            }
        }
    }
}

/// A pipe would keep its reader waiting.
fn look(path: &Path) -> std::io::Result<Seen> {
    let file = std::fs::metadata(path)?;
    if !file.is_file() {
        return Err(std::io::Error::other("it is no file"));
    }
    let changed = (file.mtime(), file.mtime_nsec());
    Ok(Seen::File { changed, bytes: file.len(), inode: file.ino() })
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path)?;
    file.take(BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn text(bytes: &[u8]) -> Result<String> {
    let wrong = |what| Error::not_applied(ErrorKind::Codec, what);
    if bytes.len() > BYTES_MAX {
        return Err(wrong("a known list of more than 8 MiB"));
    }
    String::from_utf8(bytes.to_vec()).map_err(|_| wrong("a known list that is no UTF-8"))
}

impl Shared {
    /// Schedules `lines` in place of the schedules `ids`: all of it or nothing.
    fn replace_known(&self, ids: &[u64], lines: Vec<Line>) -> Result<Vec<u64>> {
        let hash = |key: &String| (Key::from(key.as_str()), self.hash(key.as_bytes()));
        self.steer(|steering, now| {
            steering.operate(now, |operator| {
                let before = operator.clone();
                for id in ids {
                    operator.cancel(*id);
                }
                let schedules = lines.into_iter().map(|line| {
                    let (what, starts_in, lasts) = match line {
                        Line::Keys(keys, from, lasts) => {
                            (Scheduled::Keys(keys.iter().map(hash).collect()), from, lasts)
                        }
                        Line::Prefix(prefix, from, lasts) => {
                            (Scheduled::Prefix(Key::from(prefix)), from, lasts)
                        }
                    };
                    let from = now.after(starts_in);
                    operator.schedule(what, from, from.after(lasts))
                });
                let made: std::result::Result<Vec<u64>, Full> = schedules.collect();
                made.map_err(|full| {
                    *operator = before;
                    Error::not_applied(
                        ErrorKind::Limit,
                        match full {
                            Full::Keys => "a known list names more keys than may be treated",
                            Full::Denied | Full::Schedules => {
                                "a known list has too many times or prefixes"
                            }
                        },
                    )
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{MemoryStore, Store};
    use crate::testing::SimRuntime;

    /// Until it is so.
    #[expect(clippy::disallowed_methods, reason = "a file is looked at by a real thread")]
    fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        for _ in 0..500 {
            if is_so() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("not within 5 s: {what}");
    }

    #[test]
    fn a_changed_file_is_taken_up_and_a_broken_one_keeps_the_old_list_and_says_why() {
        let name = format!("heatsink-known-{}", std::process::id());
        let (file, next) =
            (std::env::temp_dir().join(&name), std::env::temp_dir().join(name + "+"));
        let put = |text: &str| {
            std::fs::write(&next, text).unwrap();
            std::fs::rename(&next, &file).unwrap();
        };
        let hs = Heatsink::new(MemoryStore::new(1)).unwrap();
        let follow = || {
            let source = KnownSource::File(file.clone());
            hs.follow_known_every(source, Duration::from_millis(20))
        };
        assert_eq!(follow().unwrap_err().kind(), ErrorKind::Config, "no such file");
        put("nonsense");
        assert_eq!(follow().unwrap_err().kind(), ErrorKind::Codec);
        put("{\"key\":\"a\"}");
        let list = follow().unwrap();
        let treated = || hs.control().treated();
        assert_eq!(treated(), ["a".into()]);
        put("{\"key\":\"b\"}\n{\"prefix\":\"m:\"}\n{\"key\":\"late\",\"from\":99999999999}");
        until("the new list is in force", || treated() == ["b".into()]);
        assert_eq!((list.stats().loaded, list.stats().lines), (2, 3));
        let many: String = (0..5_000).map(|i| format!("{{\"key\":\"k{i}\"}}\n")).collect();
        for (broken, why) in
            [("{\"kye\":\"c\"}", "line 1"), (many.as_str(), "more keys than may be treated")]
        {
            let before = list.stats().refused;
            put(broken);
            until("it is refused", || list.stats().refused == before + 1);
            assert!(list.stats().error.unwrap().contains(why));
            assert_eq!(treated(), ["b".into()], "the old list stays");
        }
        std::fs::remove_file(&file).unwrap();
        until("it is missed", || list.stats().refused == 3);
        assert_eq!(treated(), ["b".into()], "the old list stays");
        put("{\"key\":\"c\"}");
        until("it is back", || treated() == ["c".into()]);
        assert_eq!(list.stats().error, None);
        drop(list);
        assert!(treated().is_empty());
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_file_that_could_not_be_read_once_is_read_later_and_a_pipe_keeps_nobody_waiting() {
        let file = std::env::temp_dir().join(format!("heatsink-pipe-{}", std::process::id()));
        let hs = Heatsink::new(MemoryStore::new(1)).unwrap();
        let follow = || hs.follow_known(KnownSource::File(file.clone()));
        let made = std::process::Command::new("mkfifo").arg(&file).status().unwrap();
        assert!(made.success());
        assert_eq!(follow().unwrap_err().kind(), ErrorKind::Config);
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, "{\"key\":\"a\"}").unwrap();
        let list = follow().unwrap();
        // What cannot be read for a moment has not been seen: the same file is read again.
        let look = || list.inner.look_at(&file);
        let away = file.with_extension("away");
        std::fs::rename(&file, &away).unwrap();
        let _ = look();
        std::fs::rename(&away, &file).unwrap();
        look().unwrap();
        assert_eq!((list.stats().error, list.stats().loaded), (None, 2));
        drop(list);
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_list_in_the_store_is_taken_up_within_ten_seconds_of_its_change() {
        let rt = SimRuntime::new(1);
        let store = MemoryStore::builder().shards(1).runtime(rt.clone()).build();
        let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).build().unwrap();
        let list = hs.follow_known(KnownSource::Store("known".into())).unwrap();
        let treated = || hs.control().treated();
        rt.run_for(Duration::from_secs(1));
        assert!(treated().is_empty() && list.stats().error.is_none());
        let put = |text: &'static str| {
            rt.block_on(async { store.put(&"known".into(), text.into(), None).await.unwrap() });
            rt.run_for(Duration::from_secs(11));
        };
        put("{\"key\":\"a\"}");
        assert_eq!(treated(), ["a".into()]);
        put("nonsense");
        assert_eq!((treated(), list.stats().refused), (vec!["a".into()], 1));
        put("{\"key\":\"b\"}");
        assert_eq!((treated(), list.stats().error), (vec!["b".into()], None));
        // A store evicts it: the old list stays, and that is said once.
        let gone = ["known".into()];
        rt.block_on(async { store.delete_many(&gone).await });
        rt.run_for(Duration::from_secs(31));
        assert_eq!((treated(), list.stats().refused), (vec!["b".into()], 2));
        assert!(list.stats().error.unwrap().contains("not in the store any more"));
        put("{\"key\":\"b\"}");
        assert_eq!((treated(), list.stats().error), (vec!["b".into()], None));
        put("");
        assert_eq!((treated(), list.stats().error), (vec![], None), "an empty one clears it");
        drop(list);
        assert!(treated().is_empty());
    }
}
