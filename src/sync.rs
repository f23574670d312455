//! The locks and swaps of the shell, so that a schedule explorer can take their place.
//!
//! Built with `--cfg heatsink_shuttle`, every lock, swap and thread-local of the request path is
//! shuttle's, and `tests/shuttle.rs` runs it under random schedules.

#[cfg(not(heatsink_shuttle))]
mod real {
    pub(crate) use arc_swap::{ArcSwap, ArcSwapOption};
    pub(crate) use parking_lot::Mutex;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    pub(crate) use std::thread_local;
}

#[cfg(heatsink_shuttle)]
mod real {
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    pub(crate) use shuttle::thread_local;
    use std::fmt;
    use std::ops::Deref;
    use std::sync::Arc;

    /// parking_lot's interface over shuttle's mutex.
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Mutex<T> {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> shuttle::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
    }

    impl<T: Default> Default for Mutex<T> {
        fn default() -> Self {
            Mutex::new(T::default())
        }
    }

    impl<T> fmt::Debug for Mutex<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Mutex")
        }
    }

    /// arc-swap's interface over a mutex: a load is one step, a store is one step.
    pub(crate) struct ArcSwap<T>(Mutex<Arc<T>>);

    impl<T> ArcSwap<T> {
        pub(crate) fn from_pointee(value: T) -> ArcSwap<T> {
            ArcSwap(Mutex::new(Arc::new(value)))
        }

        pub(crate) fn load(&self) -> Loaded<Arc<T>> {
            Loaded(self.0.lock().clone())
        }

        pub(crate) fn load_full(&self) -> Arc<T> {
            self.0.lock().clone()
        }

        pub(crate) fn store(&self, value: Arc<T>) {
            *self.0.lock() = value;
        }
    }

    pub(crate) struct ArcSwapOption<T>(Mutex<Option<Arc<T>>>);

    impl<T> ArcSwapOption<T> {
        pub(crate) fn empty() -> ArcSwapOption<T> {
            ArcSwapOption(Mutex::new(None))
        }

        pub(crate) fn load(&self) -> Loaded<Option<Arc<T>>> {
            Loaded(self.0.lock().clone())
        }

        pub(crate) fn swap(&self, value: Option<Arc<T>>) -> Option<Arc<T>> {
            std::mem::replace(&mut *self.0.lock(), value)
        }
    }

    pub(crate) struct Loaded<T>(T);

    impl<T> Deref for Loaded<T> {
        type Target = T;
        fn deref(&self) -> &T {
            &self.0
        }
    }
}

pub(crate) use real::*;
