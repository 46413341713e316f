//! Shared ownership and locks: the standard library's, or under `--cfg cuvmm_shuttle` those that a model checker
//! schedules.
//!
//! The cfg is none that anybody else has for their own models. The feature `shuttle` brings the checker, and does nothing
//! by itself: an optional dependency is in the lock file of nobody who does not ask for it.
//!
//! What threads share goes through here. What they never contend for, immutable data and counters, may be the
//! standard library's.

#[cfg(not(cuvmm_shuttle))]
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(cuvmm_shuttle)]
pub use modelled::{Arc, LASTING, LOCKED, Mutex, TORN};
#[cfg(cuvmm_shuttle)]
pub use shuttle::sync::{Condvar, MutexGuard, PoisonError};
#[cfg(cuvmm_shuttle)]
pub use shuttle::{future, lazy_static, thread};

#[cfg(cuvmm_shuttle)]
mod modelled {
    use std::cell::Cell;
    use std::ops::Deref;
    use std::sync::{self, LockResult};

    use shuttle::sync::MutexGuard;
    use shuttle::sync::atomic::{AtomicBool, Ordering};

    use crate::error::Error;
    use crate::reservation::{Reservation, Room};

    /// The standard library's `Arc`, with the scheduler asked before each change of its count: shuttle's own is the
    /// standard library's, and so would never find two last owners in each other's way.
    ///
    /// It is empty once its value was taken out.
    pub struct Arc<T: ?Sized>(Option<sync::Arc<T>>);

    thread_local! {
        /// Whether [`Arc::into_inner`] is broken on purpose: in two steps, with those of other owners in between.
        pub static TORN: Cell<bool> = const { Cell::new(false) };
        /// Whether pauses that somebody may end last until somebody does, as if each were for ever.
        pub static LASTING: Cell<bool> = const { Cell::new(false) };
    }

    /// Shuttle's, which counts how often it is locked.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    shuttle::thread_local! {
        /// How many locks a model's thread has taken.
        pub static LOCKED: Cell<usize> = const { Cell::new(0) };
    }

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            LOCKED.with(|locked| locked.set(locked.get() + 1));
            self.0.lock()
        }

        pub fn get_mut(&mut self) -> LockResult<&mut T> {
            self.0.get_mut()
        }
    }

    /// Lets another thread go first.
    fn point() {
        AtomicBool::new(false).load(Ordering::SeqCst);
    }

    impl<T> Arc<T> {
        pub fn new(value: T) -> Self {
            Self(Some(sync::Arc::new(value)))
        }

        pub fn into_inner(mut this: Self) -> Option<T> {
            point();
            let shared = this.0.take()?;
            if !TORN.get() {
                return sync::Arc::into_inner(shared);
            }
            let shared = match sync::Arc::try_unwrap(shared) {
                Ok(value) => return Some(value),
                Err(shared) => shared,
            };
            point();
            drop(shared);
            None
        }
    }

    impl<T: ?Sized> Arc<T> {
        pub fn ptr_eq(this: &Self, other: &Self) -> bool {
            std::ptr::addr_eq(&raw const **this, &raw const **other)
        }
    }

    impl<T: ?Sized> Clone for Arc<T> {
        fn clone(&self) -> Self {
            point();
            Self(self.0.clone())
        }
    }

    impl<T: ?Sized> Drop for Arc<T> {
        fn drop(&mut self) {
            if self.0.is_some() {
                point();
            }
        }
    }

    impl<T: ?Sized> Deref for Arc<T> {
        type Target = T;

        fn deref(&self) -> &T {
            match &self.0 {
                Some(shared) => shared,
                None => unreachable!("it is empty only while it is dropped"),
            }
        }
    }

    impl<T: Default> Default for Arc<T> {
        fn default() -> Self {
            Self::new(T::default())
        }
    }

    impl<T, const N: usize> From<[T; N]> for Arc<[T]> {
        fn from(values: [T; N]) -> Self {
            Self(Some(values.into()))
        }
    }

    impl<T> From<Vec<T>> for Arc<[T]> {
        fn from(values: Vec<T>) -> Self {
            Self(Some(values.into()))
        }
    }

    impl<T> FromIterator<T> for Arc<[T]> {
        fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
            Self(Some(values.into_iter().collect()))
        }
    }

    impl<T: std::fmt::Debug + ?Sized> std::fmt::Debug for Arc<T> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            self.0.fmt(f)
        }
    }

    impl Arc<Reservation> {
        pub fn take(&self, offset: usize, size: usize) -> Result<Room, Error> {
            Room::take(self, offset, size)
        }
    }
}
