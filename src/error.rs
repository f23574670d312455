//! The one error type: what kind, what became of a write, when to come back.

use crate::key;
use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What heatsink's calls return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, in one word.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ErrorKind {
    /// The store answered with an error, or could not be reached.
    Store,
    /// The store or one of its shards refuses more traffic for now.
    Throttled,
    /// The caller's own deadline passed; a load that it waited for goes on.
    Deadline,
    /// A load or a store call took longer than the configured limit.
    Timeout,
    /// The loader that the caller passed returned an error.
    Loader,
    /// A load panicked.
    Panicked,
    /// A load of a key asked for the same key.
    Recursive,
    /// The store cannot do this; `Capability` names what it can.
    Unsupported,
    /// Options that contradict each other, or that the store cannot carry.
    Config,
    /// A value could not be encoded or decoded.
    Codec,
    /// The key or the value is outside the limits.
    Limit,
    /// The value under the key has another type than the call needs.
    WrongType,
    /// A sum would not fit into 64 bits.
    Overflow,
    /// The counter is sealed: it can be read, not written.
    Sealed,
    /// The call was refused to protect the store.
    Shed,
    /// The handle was shut down.
    Closed,
}

/// What became of a write that failed. Reads always say `NotApplied`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Outcome {
    /// The store did not and will not apply the write.
    NotApplied,
    /// The write may have been applied, or may still be. It is never treated as either of the two.
    Unknown,
}

/// When a call that failed may be tried again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Retry {
    /// Not by a retry: it would fail again, or the budget for retries is spent.
    Never,
    /// At once.
    Now,
    /// Not before this much time has passed.
    After(Duration),
}

/// An error of heatsink or of the store behind it. Cloning is cheap: one failed load answers all
/// callers that joined it.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    outcome: Outcome,
    retry: Retry,
    message: Cow<'static, str>,
    key: Option<String>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of a call that the store did not apply. A store adapter returns it when it is sure.
    pub fn not_applied(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Error {
        Error::build(kind, Outcome::NotApplied, message.into())
    }

    /// An error of a write that may have been applied. A store adapter that cannot tell returns it.
    pub fn unknown(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Error {
        Error::build(kind, Outcome::Unknown, message.into())
    }

    pub(crate) fn config(message: impl Into<Cow<'static, str>>) -> Error {
        Error::not_applied(ErrorKind::Config, message)
    }

    pub(crate) fn unsupported(what: &'static str) -> Error {
        Error::not_applied(
            ErrorKind::Unsupported,
            format!("the store has no capability `{what}`; Capability names what it has"),
        )
    }

    fn build(kind: ErrorKind, outcome: Outcome, message: Cow<'static, str>) -> Error {
        let retry = match kind {
            ErrorKind::Store | ErrorKind::Throttled | ErrorKind::Timeout | ErrorKind::Loader => {
                Retry::Now
            }
            _ => Retry::Never,
        };
        Error(Arc::new(Inner { kind, outcome, retry, message, key: None, source: None }))
    }

    fn edit(mut self, f: impl FnOnce(&mut Inner)) -> Error {
        f(Arc::make_mut(&mut self.0));
        self
    }

    /// The same error with the error that caused it.
    #[must_use]
    pub fn with_source(self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        let source: Arc<dyn StdError + Send + Sync> = Arc::from(source.into());
        self.edit(|e| e.source = Some(source))
    }

    /// The same error with another hint on retries.
    #[must_use]
    pub fn with_retry(self, retry: Retry) -> Error {
        self.edit(|e| e.retry = retry)
    }

    /// The same error naming the key it is about, cut to 64 escaped bytes.
    #[must_use]
    pub fn with_key(self, key: &[u8]) -> Error {
        if self.0.key.is_some() {
            return self;
        }
        let shown = key::short(key);
        self.edit(|e| e.key = Some(shown))
    }

    /// The same error about a write whose fate nobody knows.
    pub(crate) fn with_outcome(self, outcome: Outcome) -> Error {
        self.edit(|e| e.outcome = outcome)
    }

    /// The same error of the last of several tries at one write, of which an earlier one may have
    /// been applied (`doubt`).
    pub(crate) fn after(self, doubt: bool) -> Error {
        if doubt { self.with_outcome(Outcome::Unknown) } else { self }
    }

    /// What went wrong, in one word.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What became of the write. `NotApplied` for reads.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        self.0.outcome
    }

    /// True when the write may have been applied.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        self.0.outcome == Outcome::Unknown
    }

    /// When to try again.
    #[must_use]
    pub fn retry(&self) -> Retry {
        self.0.retry
    }

    /// The key the error is about, cut to 64 escaped bytes.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        self.0.key.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        if let Some(key) = &self.0.key {
            write!(f, " (key \"{key}\")")?;
        }
        if self.is_unknown() {
            f.write_str("; the write may have been applied")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("outcome", &self.0.outcome)
            .field("retry", &self.0.retry)
            .field("message", &self.0.message)
            .field("key", &self.0.key)
            .field("source", &self.0.source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|e| e as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_word_and_says_what_became_of_the_write() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
        let e = Error::unknown(ErrorKind::Store, "connection reset").with_key(b"post:9");
        assert_eq!(
            e.to_string(),
            "connection reset (key \"post:9\"); the write may have been applied"
        );
        assert!(e.clone().is_unknown() && e.retry() == Retry::Now);
    }
}
